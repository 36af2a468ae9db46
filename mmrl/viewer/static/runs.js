// The table of runs: live, sorted, filtered; ticked runs are compared.

import { ask, change, chip, every, h, here, interval, link, modelName, plural, say, short, span, typed, when } from "./base.js";

const MOST = 300;
const COLUMNS = [
  ["name", "run", (r) => r.key.toLowerCase()],
  ["status", "status", (r) => ["running", "stale", "failed", "stopped", "unknown", "finished"].indexOf(r.status)],
  ["task", "task", (r) => r.task.toLowerCase()],
  ["model", "model", (r) => r.model.toLowerCase()],
  ["step", "step", (r) => r.step, true],
  ["headline", "held-out", (r) => r.headline?.last?.mean ?? -Infinity, true],
  ["started", "started", (r) => r.started ?? 0, true],
  ["seconds", "duration", (r) => r.seconds ?? 0, true],
];

function headline(run) {
  const found = run.headline;
  if (!found?.last) return run.reward === null ? "–" : [h("span", {}, short(run.reward)), h("br"), h("small", {}, "training reward")];
  const [mean, edges] = interval(found.last), first = found.first ? interval(found.first)[0] : "";
  const step = found.step === run.step ? "" : `, step ${found.step.toLocaleString("en-US")}`;
  return [
    first ? h("span", { class: "dim" }, `${first} → `) : null, h("b", {}, mean), " ", h("span", { class: "ci" }, edges),
    h("br"), h("small", {}, `${found.name}, ${found.how}${step}`),
    found.stand_in ? h("span", { class: "badge bad" }, "stand-in assets") : null,
  ];
}

function line(run, ticked, toggle) {
  const share = run.total ? Math.min(1, run.step / run.total) : 0;
  const cell = (label, kind, ...parts) => h("td", { "data-label": label, class: kind }, h("div", {}, ...parts));
  return h("tr", { "data-key": run.key },
    h("td", { class: "tick" }, h("input", { type: "checkbox", checked: ticked, "aria-label": `compare ${run.key}`, onchange: () => toggle(run.key) })),
    h("th", { scope: "row", class: "name" }, h("a", { href: link("/run", { key: run.key }) }, run.key),
      run.name !== run.key && !run.key.endsWith(`/${run.name}`) ? [h("br"), h("small", {}, run.name)] : null),
    cell("status", "", chip(run.status, run.said), run.said ? h("p", { class: "said" }, run.said.slice(0, 160)) : null),
    cell("task", "", run.task || "–"), cell("model", "model", h("span", { title: run.model }, modelName(run.model) || "–")),
    cell("step", "num", run.step.toLocaleString("en-US"), run.total ? h("span", { class: "dim" }, ` / ${run.total.toLocaleString("en-US")}`) : null,
      run.total && run.status === "running" ? h("progress", { value: share, max: 1, "aria-label": `steps of ${run.key}` }) : null),
    cell("held-out", "num", headline(run)), cell("started", "num", when(run.started)), cell("duration", "num", span(run.seconds)));
}

export async function showRuns(place) {
  let found = await ask("/api/runs");
  const body = h("tbody"), count = h("p", { class: "note", role: "status" });
  const head = h("tr", {}, h("th", {}, h("span", { class: "hidden" }, "compare")));
  const search = h("input", { type: "search", placeholder: "name, task, model", "aria-label": "filter runs by name, task or model" });
  const status = h("select", { "aria-label": "filter runs by status" }, ["", "running", "finished", "stopped", "failed", "stale", "unknown"].map(
    (s) => h("option", { value: s }, s || "any status")));
  const compare = h("a", { class: "button", role: "button" });
  typed(search, 150, "q");
  status.addEventListener("change", () => change({ status: status.value }));

  const toggle = (key) => {
    const ticked = here().query.getAll("run");
    change({ run: ticked.includes(key) ? ticked.filter((k) => k !== key) : [...ticked, key] });
  };

  function draw() {
    const { query } = here(), words = (query.get("q") ?? "").toLowerCase(), wanted = query.get("status") ?? "";
    if (document.activeElement !== search) search.value = query.get("q") ?? "";
    status.value = wanted;
    const sort = COLUMNS.find(([name]) => name === query.get("sort")) ?? COLUMNS[6], up = query.get("order") === "up";
    const rows = found.runs.filter((r) => (!wanted || r.status === wanted)
      && (!words || `${r.key} ${r.name} ${r.task} ${r.model}`.toLowerCase().includes(words)));
    rows.sort((a, b) => {
      const x = sort[2](a), y = sort[2](b);
      return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
    });
    head.replaceChildren(head.firstChild, ...COLUMNS.map(([name, words_, , number]) => h("th", {
      class: number ? "num" : null, scope: "col", "aria-sort": name === sort[0] ? (up ? "ascending" : "descending") : "none" },
      h("button", { type: "button", class: "sort", onclick: () => change({ sort: name, order: name === sort[0] && !up ? "up" : "" }) },
        words_, h("span", { "aria-hidden": "true" }, name === sort[0] ? (up ? " ↑" : " ↓") : "")))));
    const ticked = query.getAll("run"), focus = document.activeElement?.closest?.("tr")?.dataset.key;
    const at = focus && document.activeElement.matches("input") ? "input" : "a";
    body.replaceChildren(...rows.slice(0, MOST).map((r) => line(r, ticked.includes(r.key), toggle)));
    if (focus) body.querySelector(`tr[data-key="${CSS.escape(focus)}"] ${at}`)?.focus();
    count.textContent = found.runs.length === 0 ? `No run in ${found.roots.join(", ")} yet: the page shows the first one that starts.`
      : `${rows.length === found.runs.length ? plural(rows.length, "run") : `${rows.length} of ${plural(found.runs.length, "run")}`}`
        + (rows.length > MOST ? `, the first ${MOST} shown: filter to see others` : "");
    const many = ticked.length;
    compare.textContent = many > 7 ? "Compare at most 7" : many > 1 ? `Compare ${many} runs` : "Tick runs to compare";
    compare.classList.toggle("off", many < 2 || many > 7);
    compare.setAttribute("aria-disabled", many < 2 || many > 7);
    if (many > 1 && many <= 7) compare.setAttribute("href", link("/compare", { run: ticked }));
    else compare.removeAttribute("href");
  }

  place.append(h("h1", {}, "Runs"), h("div", { class: "tools" }, search, status, compare),
    h("div", { class: "scroll card runs", tabindex: "0", role: "region", "aria-label": "runs" }, h("table", {}, h("thead", {}, head), body)), count);
  draw();
  const stop = every(2.5, async () => {
    const fresh = await ask("/api/runs");
    const same = JSON.stringify(fresh) === JSON.stringify(found);
    found = fresh;
    if (!same) draw();
    const running = found.runs.filter((r) => r.status === "running").length;
    say(running ? `${plural(running, "run")} training` : "");
  });
  return { update: draw, close: stop };
}
