// Several runs beside each other: curves laid over each other, paired gains, what their configurations do not share.

import { address, ask, change, chip, every, h, here, interval, link, message, say, typed } from "./base.js";
import { COLORS } from "./chart.js";
import { Curves } from "./curves.js";
import { Feed } from "./feed.js";
import { tabs } from "./run.js";

const TABS = { curves: "Curves", gains: "Paired gains", config: "Configuration" };
const MOST_KEYS = 400;

// How many characters all names begin with, up to the end of a word: those say nothing in a chart's legend.
function beginning(names) {
  let end = 0;
  while (names.every((n) => end < n.length && n[end] === names[0][end])) end += 1;
  return names[0].slice(0, end).search(/[^-_./ ]*$/);
}

function gainCells(gain) {
  const [mean, edges] = interval(gain, true), sure = gain.low !== null && (gain.low > 0 || gain.high < 0);
  return [h("td", { class: "num" }, h("b", { class: sure ? (gain.mean > 0 ? "yes" : "no") : null }, mean), " ", h("span", { class: "ci" }, edges)),
    h("td", {}, sure ? (gain.mean > 0 ? "higher" : "lower") : "no certain difference"), h("td", { class: "num" }, gain.n.toLocaleString("en-US"))];
}

function gainTable(caption, head, rows) {
  return h("div", { class: "scroll card", tabindex: "0", role: "region", "aria-label": caption }, h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, head.map(([t, n]) => h("th", { scope: "col", class: n ? "num" : null }, t)))), h("tbody", {}, rows)));
}

async function gains(body, keys) {
  const { query } = here(), base = keys.includes(query.get("base")) ? query.get("base") : keys[0];
  const choose = h("select", { "aria-label": "compared with" }, keys.map((k) => h("option", { value: k }, k)));
  choose.value = base;
  choose.addEventListener("change", () => change({ base: choose.value }));
  const place = h("div", {}, message("Pairing the answers …"));
  body.replaceChildren(h("div", { class: "tools" }, h("label", {}, "compared with ", choose)), place);
  const parts = [];
  for (const key of keys.filter((k) => k !== base)) {
    const found = await ask("/api/compare", { run: [base, key] });
    parts.push(h("h2", {}, key, " ", h("small", {}, `against ${base}`)));
    if (found.why) parts.push(message(found.why));
    if (!found.gains.length) continue;
    parts.push(gainTable("the same prompts in both last evaluations", [["metric"], ["mode"], [base, 1], [key, 1], ["paired gain", 1], [""], ["prompts", 1]],
      found.gains.map((g) => h("tr", {}, h("th", { scope: "row" }, g.name), h("td", {}, g.mode), ...[g.before, g.after].map((e) => h("td", { class: "num" }, interval(e)[0], " ", h("span", { class: "ci" }, interval(e)[1]))), ...gainCells(g.gain)))));
    if (found.sources.length) {
      parts.push(gainTable("each source by its own metric", [["source"], ["mode"], ["paired gain", 1], [""], ["prompts", 1]],
        found.sources.map((g) => h("tr", {}, h("th", { scope: "row" }, g.source), h("td", {}, g.mode), ...gainCells(g.gain)))));
    }
    parts.push(h("p", { class: "note" }, `Evaluations of steps ${found.steps[0]} and ${found.steps[1]}; 95 % bootstrap over prompts, not corrected for the number of rows.`));
  }
  place.replaceChildren(...parts);
}

async function configs(body, keys) {
  const found = (await ask("/api/diff", { run: keys })).keys;
  const all = h("input", { type: "checkbox" }), find = h("input", { type: "search", placeholder: "find a key", "aria-label": "find a key" });
  const rows = h("tbody"), note = h("p", { class: "note", role: "status" });
  const draw = () => {
    const { query } = here(), words = (query.get("find") ?? "").toLowerCase();
    all.checked = query.get("all") === "1";
    if (document.activeElement !== find) find.value = query.get("find") ?? "";
    const fits = found.filter((k) => (all.checked || k.differs) && (!words || k.key.toLowerCase().includes(words) || k.values.some((v) => v?.toLowerCase().includes(words))));
    rows.replaceChildren(...fits.slice(0, MOST_KEYS).map((k) => h("tr", { class: k.differs ? "differs" : null }, h("th", { scope: "row" }, k.key), ...k.values.map((v) => h("td", {}, v === null ? h("span", { class: "dim" }, "–") : v)))));
    const differ = found.filter((k) => k.differs).length;
    note.textContent = `${differ} of ${found.length} keys differ${fits.length > MOST_KEYS ? `; the first ${MOST_KEYS} are shown` : ""}`;
  };
  all.addEventListener("change", () => change({ all: all.checked ? "1" : "" }));
  typed(find, 150, "find");
  body.replaceChildren(h("div", { class: "tools" }, find, h("label", {}, all, " also equal keys")), note,
    h("div", { class: "scroll card diff", tabindex: "0", role: "region", "aria-label": "configurations" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "key"), keys.map((k) => h("th", { scope: "col" }, k)))), rows)));
  draw();
  return draw;
}

export async function showCompare(place, { query }) {
  const keys = [...new Set(query.getAll("run"))], tab = TABS[query.get("tab")] ? query.get("tab") : "curves";
  if (keys.length < 2) {
    place.append(message("Tick two to seven runs in the table to compare them."), h("p", {}, h("a", { href: "#/" }, "All runs")));
    return null;
  }
  const pages = await Promise.all(keys.map((key) => ask("/api/run", { run: key })));
  const shared = beginning(keys);
  const runs = keys.map((key, i) => ({ key, name: key.slice(shared), feed: new Feed(key), page: pages[i] }));
  const body = h("div", { class: "tab-body" });
  place.append(h("h1", {}, `${keys.length} runs`), h("p", { class: "compared" }, runs.map((r, i) => {
    const made = h("span", { class: "key" }, h("i"), h("a", { href: link("/run", { key: r.key }) }, r.key), " ", chip(r.page.status));
    made.style.setProperty("--c", `var(${COLORS[i % COLORS.length]})`);
    return made;
  })), h("div", { class: "tab-line" }, tabs("/compare", { run: keys }, TABS, tab), h("a", { class: "button", href: address("/download/comparison.html", { run: keys }), download: "" }, "Export as one page")), body);
  let curves = null, redraw = null, base = query.get("base");
  if (tab === "curves") {
    curves = new Curves(runs);
    body.append(curves.tools, curves.place);
  } else if (tab === "config") redraw = await configs(body, keys);
  const fail = (problem) => body.replaceChildren(message(problem.message, "problem"));
  const stop = every(3, async () => {
    if (!curves) return;
    const versions = runs.map((r) => r.feed.version), changed = await Promise.all(runs.map((r) => r.feed.grow()));
    for (const [i, run] of runs.entries()) if (versions[i] !== null && versions[i] !== run.feed.version) run.page = await ask("/api/run", { run: run.key });
    const live = runs.filter((r) => r.feed.status === "running").length;
    say(live ? `${live} training` : "");
    if (changed.some(Boolean)) curves.draw();
  });
  return {
    shown: () => {
      if (curves) curves.begin().catch(fail);
      else if (tab === "gains") gains(body, keys).catch(fail);
    },
    update: () => {
      if (curves) return curves.update();
      const next = here().query.get("base");
      if (tab === "gains" && next !== base) {
        base = next;
        return gains(body, keys).catch(fail);
      }
      return redraw?.();
    },
    close: () => {
      stop();
      curves?.close();
    },
  };
}
