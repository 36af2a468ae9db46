// The charts of one run, or of several laid over each other, growing while they train.

import { address, change, h, here, message, typed } from "./base.js";
import { Chart } from "./chart.js";

const GROUPS = { training: "Training", timing: "Time, speed, memory" };
const MOST_OTHER = 60;

// `runs`: [{key, name, feed, page}], page the answer of /api/run.
export class Curves {
  constructor(runs) {
    this.runs = runs;
    this.charts = new Map();
    this.sections = new Map();
    this.smooth = h("select", { "aria-label": "smoothing" }, [1, 5, 20, 50].map((n) => h("option", { value: n }, n === 1 ? "as logged" : `mean of ${n}`)));
    this.smooth.addEventListener("change", () => change({ smooth: this.smooth.value === "1" ? "" : this.smooth.value }));
    this.find = h("input", { type: "search", placeholder: "find a chart or metric", "aria-label": "find a chart or metric" });
    typed(this.find, 150, "find");
    const keys = runs.map((r) => r.key);
    this.tools = h("div", { class: "tools" }, this.find, this.smooth,
      ...(runs.length === 1 ? [h("a", { class: "button", href: address("/download/metrics.csv", { run: keys[0] }), download: "" }, "CSV of all metrics")] : []));
    this.place = h("div", { class: "curves" });
  }

  // Metrics of the charts that are shown at once; those of the group 'other' are asked for when it is opened.
  wanted() {
    const { open, find } = this.state();
    return [...new Set(this.specs().filter((c) => c.group !== "other" || open || find).flatMap((c) => c.names).concat("train/reward/mean"))].slice(0, 400);
  }

  state() {
    const { query } = here();
    return { smooth: Number(query.get("smooth") ?? 1) || 1, find: (query.get("find") ?? "").toLowerCase(), open: query.get("more") === "1" };
  }

  // The charts of all runs, those of the same title once.
  specs() {
    const found = new Map();
    for (const { page } of this.runs) {
      for (const spec of page.charts) {
        const known = found.get(spec.title);
        if (!known) found.set(spec.title, { ...spec, names: [...spec.names], words: [...spec.words] });
        else spec.names.forEach((n, i) => {
          if (!known.names.includes(n)) {
            known.names.push(n);
            known.words.push(spec.words[i]);
          }
        });
      }
    }
    return [...found.values()];
  }

  async begin() {
    for (const { feed } of this.runs) feed.want(this.wanted());
    await Promise.all(this.runs.map((r) => r.feed.grow()));
    this.draw();
  }

  // Asks for more where the address asks for more charts.
  async update() {
    for (const { feed } of this.runs) feed.want(this.wanted());
    if (this.runs.some((r) => r.feed.next === 0)) await Promise.all(this.runs.map((r) => r.feed.grow()));
    this.draw();
  }

  draw() {
    const { smooth, find, open } = this.state();
    this.smooth.value = String(smooth);
    if (document.activeElement !== this.find) this.find.value = here().query.get("find") ?? "";
    const fits = (c) => !find || c.title.toLowerCase().includes(find) || (c.names ?? []).some((n) => n.toLowerCase().includes(find));
    const shown = new Set(), held = this.heldOut().filter(fits);
    this.section("held", "Held-out", held, shown, (spec) => spec.lines, 0);
    const specs = this.specs().filter(fits);
    for (const [group, title] of Object.entries(GROUPS)) {
      this.section(group, title, specs.filter((c) => c.group === group), shown, (spec) => this.lines(spec), smooth);
    }
    this.other(specs.filter((c) => c.group === "other"), shown, smooth, open || find !== "");
    for (const [title, chart] of this.charts) {
      if (!shown.has(title)) {
        chart.close();
        chart.card.remove();
        this.charts.delete(title);
      }
    }
    this.none ??= message("");
    this.none.textContent = find ? "No chart of that name." : "metrics.jsonl holds no steps yet: curves appear with the first one.";
    this.none.hidden = shown.size > 0;
    if (!this.none.isConnected) this.place.prepend(this.none);
  }

  section(key, title, specs, shown, linesOf, smooth) {
    if (!this.sections.has(key)) {
      const cards = h("div", { class: "charts" }), made = h("section", { class: "group" }, h("h2", {}, title), cards);
      this.sections.set(key, { made, cards });
      this.place.append(made);
    }
    const { made, cards } = this.sections.get(key);
    const there = specs.map((spec) => ({ spec, lines: linesOf(spec).filter((l) => l.values.some((v) => v !== null && v !== undefined)) })).filter((s) => s.lines.length);
    for (const { spec, lines } of there) this.chart(key, spec, lines, cards, shown, smooth);
    made.hidden = there.length === 0;
  }

  chart(key, spec, lines, cards, shown, smooth) {
    const id = `${key}/${spec.title}`;
    shown.add(id);
    if (!this.charts.has(id)) {
      const one = this.runs.length === 1 && spec.names;
      const csv = one ? address("/download/metrics.csv", { run: this.runs[0].key, names: spec.names }) : null;
      const made = new Chart(spec, { csv });
      made.state.log = spec.log && lines.every((l) => l.values.every((v) => v === null || v === undefined || v >= 0));
      this.charts.set(id, made);
      cards.append(made.card);
    }
    const made = this.charts.get(id);
    made.set({ ...made.state, lines, smooth, xName: "step" });
  }

  lines(spec) {
    const many = this.runs.length > 1, single = spec.names.length === 1;
    return this.runs.flatMap(({ name, feed }, r) => spec.names.map((n, i) => ({
      name: many ? (single ? name : `${name}: ${spec.words[i]}`) : spec.words[i],
      color: many ? r : i, dash: many && i > 0 ? [4 + 3 * (i % 3), 3] : undefined,
      steps: feed.steps, values: feed.series[n] ?? [], noisy: spec.smooth })));
  }

  heldOut() {
    const many = this.runs.length > 1, metrics = new Map(), sources = new Map();
    for (const { page } of this.runs) {
      for (const m of page.evals.metrics) metrics.set(m.key, m.name);
      for (const s of page.evals.sources) sources.set(s.key, s.metric);
    }
    const make = (title, unit, of) => ({ title, unit, group: "held",
      lines: this.runs.flatMap(({ name, page }, r) => ["sampled", "greedy"].map((mode, m) => {
        const found = page.evals.steps.map((e) => [e.step, of(e, mode)]).filter(([, v]) => v);
        return { name: many ? `${name}, ${mode}` : mode, color: many ? r : m, dash: many && m ? [5, 4] : undefined, noisy: false,
          steps: found.map(([s]) => s), values: found.map(([, v]) => v[0]), low: found.map(([, v]) => v[1]), high: found.map(([, v]) => v[2]) };
      }).filter((l) => l.steps.length)) });
    const rate = { zero: false };
    const out = [...metrics].map(([key, title]) => ({ ...rate, ...make(title, "held-out", (e, mode) => e.modes[mode]?.[key]) }));
    for (const [key, metric] of sources) {
      out.push({ ...rate, ...make(`${key} (source)`, metric, (e, mode) => e.sources[key]?.[mode === "greedy" || !e.modes.greedy ? (e.modes[mode] ? "headline" : "") : `${mode}/headline`]) });
    }
    return out;
  }

  other(specs, shown, smooth, open) {
    if (!this.sections.has("other")) {
      const cards = h("div", { class: "charts" }), summary = h("summary"), note = h("p", { class: "note" });
      const made = h("details", { class: "group" }, summary, note, cards);
      made.addEventListener("toggle", () => change({ more: made.open ? "1" : "" }));
      this.sections.set("other", { made, cards, summary, note });
      this.place.append(made);
    }
    const { made, cards, summary, note } = this.sections.get("other");
    made.hidden = specs.length === 0;
    summary.textContent = `All other metrics (${specs.length})`;
    note.textContent = specs.length > MOST_OTHER ? `The first ${MOST_OTHER} are shown; find others by name.` : "";
    if (open && !made.open) made.open = true;
    if (!open) return;
    for (const spec of specs.slice(0, MOST_OTHER)) {
      const lines = this.lines(spec).filter((l) => l.values.some((v) => v !== null && v !== undefined));
      if (lines.length) this.chart("other", spec, lines, cards, shown, smooth);
    }
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}
