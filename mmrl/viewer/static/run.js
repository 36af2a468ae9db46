// The page of one run: what it is and where it stands, and its tabs.

import { address, ask, chip, every, h, here, interval, link, message, modelName, plural, say, short, span, when } from "./base.js";
import { Curves } from "./curves.js";
import { Feed } from "./feed.js";
import { showSamples } from "./samples.js";

const TABS = { curves: "Curves", samples: "Samples", alarms: "Alarms", config: "Configuration" };

export function tabs(path, query, names, current, counts = {}) {
  return h("nav", { class: "tabs", "aria-label": "parts of the page" }, Object.entries(names).map(([key, title]) =>
    h("a", { href: link(path, { ...query, tab: key }), "aria-current": key === current ? "page" : null }, title,
      counts[key] ? h("span", { class: "count" }, ` ${counts[key].toLocaleString("en-US")}`) : null)));
}

function top(page) {
  const found = page.headline, info = page.info;
  const mean = found?.last ? interval(found.last) : null, first = found?.first ? interval(found.first) : null;
  const facts = [
    ["task", info.task], ["model", info.model ? h("span", { title: String(info.model) }, modelName(String(info.model))) : ""], ["step", `${page.step.toLocaleString("en-US")}${info.total_steps ? ` of ${info.total_steps.toLocaleString("en-US")}` : ""}`],
    ["started", info.started ? when(Date.parse(info.started) / 1000) : ""],
    ["duration", page.seconds === null ? "" : span(page.seconds)],
  ].filter(([, v]) => v);
  return [
    h("h1", {}, page.key, " ", chip(page.status, info.error ?? "")),
    info.error ? message(info.error, "problem") : null,
    mean ? h("p", { class: "verdict" }, `Held-out ${found.name} (${found.how}): `, first ? [h("span", { class: "dim" }, `${first[0]} ${first[1]} → `)] : null,
      h("b", {}, mean[0]), " ", h("span", { class: "ci" }, mean[1]), ` at step ${found.step.toLocaleString("en-US")}`,
      found.stand_in ? h("span", { class: "badge bad" }, "stand-in assets: no benchmark score") : null) : null,
    h("dl", { class: "facts" }, facts.map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v)))),
  ];
}

function alarms(page) {
  if (!page.alarms.length) return message(page.rows ? `No alarm was raised in ${plural(page.rows, "step")}.` : "No step has been taken yet.");
  return h("ul", { class: "alarms" }, [...page.alarms].reverse().map((a) => h("li", { class: a.severity === "error" ? "error" : "warning" },
    h("span", { class: "step" }, `step ${a.step}`), h("b", {}, String(a.name ?? "alarm").replaceAll("_", " ")), h("span", { class: "sev" }, a.severity ?? "warning"),
    h("p", {}, String(a.message ?? "").slice(0, 2000)))));
}

function table(title, values) {
  const rows = Object.entries(values ?? {});
  return rows.length ? h("div", { class: "card" }, h("h2", { class: "small" }, title), h("table", { class: "pairs" }, h("tbody", {},
    rows.map(([k, v]) => h("tr", {}, h("td", {}, k), h("td", {}, typeof v === "object" ? JSON.stringify(v) : String(v))))))) : null;
}

function configuration(page) {
  return [
    page.info.command ? [h("h2", { class: "small" }, "Command"), h("pre", { class: "code", tabindex: "0" }, page.info.command)] : null,
    h("h2", { class: "small" }, "config.yaml"),
    page.config ? h("pre", { class: "code tall", tabindex: "0" }, page.config) : message("config.yaml is missing."),
    h("div", { class: "charts" }, table("Versions", page.info.versions), table("Machine", page.info.machine)),
    page.notes.length ? h("details", { class: "notes" }, h("summary", {}, "Missing or unreadable"), h("ul", {}, page.notes.map((n) => h("li", {}, n)))) : null,
  ].flat();
}

export async function showRun(place, { query }) {
  const key = query.get("key") ?? "", tab = TABS[query.get("tab")] ? query.get("tab") : "curves";
  let page = await ask("/api/run", { run: key });
  const head = h("div", { class: "top-of-run" }, top(page)), body = h("div", { class: "tab-body" });
  const report = h("a", { class: "button", href: address("/download/report.html", { run: key }), download: "" }, "Export the report");
  place.append(head, h("div", { class: "tab-line" }, tabs("/run", { key }, TABS, tab, { alarms: page.alarms.length }), report), body);

  const feed = new Feed(key);
  let curves = null, samples = null;
  if (tab === "curves") {
    curves = new Curves([{ key, name: page.name, feed, page }]);
    body.append(curves.tools, curves.place);
  } else if (tab === "samples") samples = await showSamples(body, key, page);
  else body.append(...[tab === "alarms" ? alarms(page) : configuration(page)].flat().filter(Boolean));

  const stop = every(2, async () => {
    const before = feed.version, status = feed.status, columns = feed.columns;
    const changed = await feed.grow();
    say(feed.status === "running" ? `live, step ${feed.step.toLocaleString("en-US")}` : "");
    if ((before !== null && before !== feed.version) || (status && status !== feed.status)) {
      page = await ask("/api/run", { run: key });
      head.replaceChildren(...top(page).filter(Boolean));
      if (curves) curves.runs[0].page = page;
      if (tab === "alarms") body.replaceChildren(alarms(page));
    }
    if (changed && curves) {
      if (columns !== feed.columns) page = curves.runs[0].page = await ask("/api/run", { run: key });
      await curves.update();
    }
    samples?.poll(feed.status === "running");
  });
  return {
    shown: () => {
      if (curves) curves.begin().catch((problem) => body.prepend(message(problem.message, "problem")));
      else feed.grow().catch(() => say(""));
      samples?.shown?.();
    },
    update: () => (curves ? curves.update() : samples?.update()),
    close: () => {
      stop();
      curves?.close();
      samples?.close();
    },
  };
}
