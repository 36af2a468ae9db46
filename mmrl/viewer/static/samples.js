// The explorer: rollouts and predictions, filtered, sorted and searched by the server, page by page; one row whole beside them.

import { address, ask, change, h, here, link, message, plural, short, typed } from "./base.js";
import { detail } from "./sample.js";

const PAGE = 50;
const TABLES = [["predictions", "held-out predictions"], ["rollouts", "training rollouts"], ["evaluations", "predictions of mmrl eval"]];
const FILTERS = ["evaluation", "source", "task", "mode", "reason", "stop"];
const RANGES = [["step_min", "first step", "1"], ["step_max", "last step", "1"], ["reward_min", "reward from", "any"], ["reward_max", "reward to", "any"]];
const STATE = [...FILTERS, ...RANGES.map(([n]) => n), "parsed", "contrast", "unit", "q", "sort", "order"];

function wishOf(query, fallback) {
  const wish = { table: query.get("table") ?? fallback };
  for (const name of STATE) if (query.getAll(name).length) wish[name] = query.getAll(name);
  return wish;
}

export async function showSamples(place, key, page) {
  const there = TABLES.filter(([name]) => page.samples[name]);
  if (!there.length) {
    place.append(message("No rollouts or predictions yet: they appear with the first step that logs them (train.log_rollouts) or the first evaluation."));
    return { update() {}, close() {}, poll() {} };
  }
  const fallback = there[0][0];
  const list = h("ol", { class: "sample-list" }), count = h("p", { class: "note", role: "status" }), side = h("section", { class: "detail", "aria-label": "sample" });
  const pager = h("div", { class: "pager" }), fresh = h("button", { type: "button", class: "fresh", hidden: true, onclick: () => refresh(true) });
  const controls = makeControls(there, fallback);
  const jsonl = h("a", { class: "button", download: "" }, "Download JSONL");
  controls.tools.append(jsonl);
  place.append(controls.tools, h("div", { class: "explorer" }, h("div", { class: "list-side" }, count, fresh, list, pager), side));
  let asked = "", shownRow = null, last = null, timer = 0, aborter = null;

  async function refresh(force = false) {
    const { query } = here(), wish = wishOf(query, fallback), at = Math.max(0, Number(query.get("page") ?? 1) - 1 || 0);
    const name = JSON.stringify([wish, at]);
    if (name === asked && !force) {
      mark();
      return;
    }
    clearTimeout(timer);
    aborter?.abort();
    aborter = new AbortController();
    if (name !== asked) list.setAttribute("aria-busy", "true");
    asked = name;
    let found;
    try {
      found = await ask("/api/samples", { run: key, ...wish, offset: at * PAGE, limit: PAGE }, aborter.signal);
    } catch (problem) {
      if (problem.name === "AbortError") return;
      asked = "";
      list.replaceChildren();
      count.textContent = problem.message;
      return;
    } finally {
      list.removeAttribute("aria-busy");
    }
    if (asked !== name) return;
    last = found;
    fresh.hidden = true;
    controls.fill(found.facets, wish);
    jsonl.href = address("/download/samples.jsonl", { run: key, ...wish });
    draw(found, wish, at);
    if (!found.done) timer = setTimeout(() => refresh(true).catch(() => {}), 400);
    mark();
  }

  function draw(found, wish, at) {
    const pages = Math.max(1, Math.ceil(found.total / PAGE));
    const kept = list.scrollTop, focus = document.activeElement?.closest?.(".sample-list a")?.dataset.row;
    count.textContent = `${plural(found.total, "row")}${found.total !== found.read ? ` of ${found.read.toLocaleString("en-US")}` : ""}`
      + (found.done ? "" : `, reading on (${found.read.toLocaleString("en-US")} so far)`)
      + (found.complete ? "" : ", the search was broken off after 20 s: filter first")
      + (found.broken ? `, ${plural(found.broken, "line")} could not be read` : "");
    list.replaceChildren(...found.rows.map((r) => line(r, wish)));
    list.scrollTop = kept;
    if (focus) list.querySelector(`a[data-row="${focus}"]`)?.focus({ preventScroll: true });
    if (!found.rows.length) list.replaceChildren(h("li", {}, message(found.done ? "No row fits these filters." : "Reading …")));
    const turn = (to, words, label, off) => h("button", { type: "button", disabled: off, "aria-label": label, onclick: () => change({ page: to > 1 ? to : "" }, true) }, words);
    pager.replaceChildren(turn(1, "«", "first page", at === 0), turn(at, "‹", "previous page", at === 0), h("span", {}, `page ${(at + 1).toLocaleString("en-US")} of ${pages.toLocaleString("en-US")}`),
      turn(at + 2, "›", "next page", at + 1 >= pages), turn(pages, "»", "last page", at + 1 >= pages));
  }

  function line(row, wish) {
    const thumb = row.media === "picture" ? h("img", { src: address("/api/picture", { run: key, table: wish.table, row: row.row }), alt: "", loading: "lazy", width: 64, height: 48 })
      : h("span", { class: "thumb", "aria-hidden": "true" }, row.media === "clip" || row.media === "episode" ? "▶" : "¶");
    thumb.addEventListener("error", () => thumb.replaceWith(h("span", { class: "thumb", "aria-hidden": "true" }, "?")));
    const { path, query } = here(), next = Object.fromEntries([...new Set(query.keys())].map((k) => [k, query.getAll(k)]));
    return h("li", {}, h("a", { href: link(path, { ...next, row: row.row }), "data-row": row.row, class: "sample" }, thumb,
      h("span", { class: "words" }, h("span", { class: "question", dir: "auto" }, row.question || row.id || "(no question)"), h("span", { class: "said", dir: "auto" }, row.said || row.text || "(empty answer)"),
        h("span", { class: "meta" }, `step ${row.step} · ${row.source || row.task}${row.mode === "greedy" ? " · greedy" : ""}${row.turns > 1 ? ` · ${row.turns} turns` : ""}${row.contrast ? " · changed input" : ""}`)),
      h("span", { class: `reward ${row.parsed ? "" : "bad"}`, title: row.parsed ? "reward" : `not parsed: ${row.reason}` }, row.parsed ? short(row.reward) : "✕ ".concat(short(row.reward)))));
  }

  // The row that the address names, beside the list.
  async function mark() {
    const { query } = here(), row = query.get("row"), table = wishOf(query, fallback).table;
    for (const one of list.querySelectorAll("a")) {
      if (one.dataset.row === row) one.setAttribute("aria-current", "true");
      else one.removeAttribute("aria-current");
    }
    place.querySelector(".explorer").classList.toggle("open", row !== null);
    const name = `${table}/${row}`;
    if (name === shownRow) return;
    shownRow = name;
    if (row === null) {
      side.replaceChildren(h("p", { class: "missing" }, "Choose a row to see it whole. Keys: j and k, or the arrows, go through the rows."));
      return;
    }
    try {
      const found = await ask("/api/sample", { run: key, table, row });
      if (shownRow === name) side.replaceChildren(detail(key, table, found, { step, close: () => change({ row: "" }, true) }));
    } catch (problem) {
      if (shownRow === name) side.replaceChildren(message(problem.message, "problem"));
    }
  }

  // To the row before or after, over the edges of pages, too.
  function step(way) {
    const rows = last?.rows ?? [], { query } = here(), at = rows.findIndex((r) => String(r.row) === query.get("row"));
    const next = rows[at + way];
    if (next) change({ row: next.row });
    list.querySelector(`a[data-row="${next?.row}"]`)?.scrollIntoView({ block: "nearest" });
  }

  function keys(event) {
    if (event.target.closest?.("input, select, textarea, dialog, video") || event.ctrlKey || event.metaKey || event.altKey) return;
    const way = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
    if (way && (event.key.length === 1 || event.target.closest?.(".explorer"))) {
      event.preventDefault();
      step(way);
    }
    if (event.key === "/") {
      event.preventDefault();
      controls.search.focus();
    }
  }
  document.addEventListener("keydown", keys);
  return {
    shown: () => refresh().catch(() => {}),
    update: () => {
      controls.read();
      return refresh();
    },
    async poll(running) {
      if (!running || !last?.done) return;
      const { query } = here(), found = await ask("/api/samples", { run: key, ...wishOf(query, fallback), offset: 0, limit: 1 });
      const more = found.total - last.total;
      fresh.hidden = more === 0;
      fresh.textContent = more > 0 ? `${plural(more, "new row")}: show` : "The rows changed: show";
    },
    close: () => {
      clearTimeout(timer);
      aborter?.abort();
      document.removeEventListener("keydown", keys);
    },
  };
}

function makeControls(tables, fallback) {
  const set = (changes) => change({ ...changes, page: "", row: "" }, true);
  const table = h("select", { "aria-label": "rows of" }, tables.map(([n, w]) => h("option", { value: n }, w)));
  table.addEventListener("change", () => set({ table: table.value, ...Object.fromEntries([...FILTERS, "unit"].map((f) => [f, ""])) }));
  const search = h("input", { type: "search", placeholder: "search prompts and answers", "aria-label": "search prompts and answers", class: "wide" });
  typed(search, 350, "q", { page: "", row: "" });
  const selects = Object.fromEntries(FILTERS.map((name) => {
    const made = h("select", { "aria-label": `filter by ${name === "reason" ? "reason of failure" : name}` });
    made.addEventListener("change", () => set(name === "reason" && made.value === "*" ? { reason: "", parsed: "0" } : { [name]: made.value, ...(name === "reason" ? { parsed: "" } : {}) }));
    return [name, made];
  }));
  const ranges = Object.fromEntries(RANGES.map(([name, label, step]) => {
    const made = h("input", { type: "number", step, placeholder: label, "aria-label": label, class: "number" });
    typed(made, 350, name, { page: "", row: "" });
    return [name, made];
  }));
  const sort = h("select", { "aria-label": "sort by" }, [["step|down", "newest step first"], ["step|up", "oldest step first"], ["reward|up", "lowest reward first"],
    ["reward|down", "highest reward first"], ["headline|up", "lowest metric first"], ["headline|down", "highest metric first"], ["file|up", "as logged"]].map(([v, w]) => h("option", { value: v }, w)));
  sort.addEventListener("change", () => {
    const [by, order] = sort.value.split("|");
    set({ sort: by === "step" ? "" : by, order: order === "down" ? "" : order });
    if (by === "step" && order === "up") set({ sort: "step", order });
  });
  const reset = h("button", { type: "button", onclick: () => set(Object.fromEntries(STATE.map((n) => [n, ""]))) }, "Clear filters");
  const unit = h("button", { type: "button", class: "on", hidden: true, onclick: () => set({ unit: "" }) }, "one prompt ✕");
  for (const made of [...Object.values(selects), ...Object.values(ranges)]) made.classList.add("filter");
  const more = h("button", { type: "button", class: "more-filters", "aria-expanded": "false", onclick: () => {
    more.setAttribute("aria-expanded", tools.classList.toggle("all"));
  } }, "Filters");
  const tools = h("div", { class: "tools samples-tools" }, table, search, more, ...Object.values(selects), ...Object.values(ranges), sort, unit, reset);

  function read() {
    const { query } = here(), now = document.activeElement;
    table.value = query.get("table") ?? fallback;
    if (now !== search) search.value = query.get("q") ?? "";
    for (const [name, made] of Object.entries(ranges)) if (now !== made) made.value = query.get(name) ?? "";
    for (const [name, made] of Object.entries(selects)) made.value = name === "reason" && query.get("parsed") === "0" ? "*" : query.get(name) ?? "";
    sort.value = `${query.get("sort") ?? "step"}|${query.get("order") ?? "down"}`;
    unit.hidden = !query.get("unit");
    reset.hidden = !STATE.some((n) => query.get(n));
  }

  function fill(facets, wish) {
    for (const [name, made] of Object.entries(selects)) {
      const found = (facets[name] ?? []).filter(([text]) => text !== ""), chosen = wish[name]?.[0];
      if (chosen && !found.some(([text]) => text === chosen)) found.push([chosen, 0]);
      const any = { evaluation: "any evaluation", source: "any source", task: "any task", mode: "any mode", reason: "parsed or not", stop: "any ending" }[name];
      const options = [["", any], ...(name === "reason" && found.length ? [["*", `not parsed (${found.reduce((n, [, c]) => n + c, 0).toLocaleString("en-US")})`]] : []),
        ...found.map(([text, n]) => [text, `${text} (${n.toLocaleString("en-US")})`])];
      const text = JSON.stringify(options);
      if (made.dataset.options !== text) {
        made.dataset.options = text;
        made.replaceChildren(...options.map(([v, w]) => h("option", { value: v }, w)));
      }
      made.hidden = found.length < (name === "reason" ? 1 : 2) && !chosen;
    }
    read();
  }
  return { tools, search, fill, read };
}
