// One chart on a card: lines, bands of intervals, a read-out at the pointer, and its numbers and picture to keep.
/* global uPlot */

import { h, short } from "./base.js";
import { aligned, smoothed } from "./feed.js";

export const COLORS = ["--c1", "--c2", "--c3", "--c5", "--c4", "--c6", "--c7", "--gray"];
const HEIGHT = 200, DOTS = 40; // so few points are drawn as dots, too
const MANY_LINES = 5; // of more the legend scrolls: the chart is what one came for
const sync = uPlot.sync("steps");

export function colorOf(index) {
  return getComputedStyle(document.documentElement).getPropertyValue(COLORS[index % COLORS.length]).trim();
}

function variable(index) {
  return `var(${COLORS[index % COLORS.length]})`;
}

const pale = (color, share) => `color-mix(in srgb, ${color} ${Math.round(100 * share)}%, transparent)`;

// `spec`: {title, unit, percent, zero, log, bounds}; `set({lines, smooth, log, xName})` draws, each line {name, color, steps,
// values, low, high, noisy, dash}.
export class Chart {
  constructor(spec, kept = {}) {
    this.spec = spec;
    this.hidden = new Set();
    this.plot = null;
    this.state = { lines: [] };
    this.legend = h("div", { class: "keys" });
    this.at = h("span", { class: "at" });
    this.canvas = h("div", { class: "uplot-place", role: "img" });
    const button = (text, label, work) => h("button", { type: "button", class: "small", "aria-label": `${text}: ${spec.title}`, title: label, onclick: work }, text);
    this.logButton = button("log", "logarithmic axis", () => this.set({ ...this.state, log: !this.isLog() }));
    this.card = h("figure", { class: "card chart-card", "data-title": spec.title },
      h("figcaption", {}, h("div", { class: "head" }, h("h3", {}, spec.title, " ", h("small", {}, spec.unit ?? "")), this.at),
        this.legend),
      this.canvas,
      h("div", { class: "keep" }, this.logButton, kept.csv ? h("a", { class: "small", href: kept.csv, download: "", "aria-label": `CSV: ${spec.title}` }, "CSV") : null,
        button("PNG", "picture of the chart", () => this.download())));
    this.resized = new ResizeObserver(() => {
      const width = this.canvas.clientWidth;
      if (this.plot && width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: HEIGHT });
      else if (!this.plot && width) this.draw();
    });
    this.resized.observe(this.canvas);
    this.themed = () => this.draw();
    window.addEventListener("themechange", this.themed);
  }

  close() {
    this.resized.disconnect();
    window.removeEventListener("themechange", this.themed);
    this.plot?.destroy();
    this.plot = null;
  }

  isLog() {
    return this.state.log ?? false;
  }

  set(state) {
    this.state = state;
    this.draw();
  }

  // Lines as uPlot's series: faint raw values below their trailing mean, edges of intervals with a band between them.
  series() {
    const { lines, smooth = 0 } = this.state, out = [], bands = [];
    for (const [number, line] of lines.entries()) {
      const off = this.hidden.has(line.name), color = colorOf(line.color ?? number);
      const add = (values, more) => out.push({ steps: line.steps, values: off ? [] : values, line: number, stroke: color, ...more });
      if (line.low && line.high) {
        add(line.high, { quiet: true, width: 0 });
        add(line.low, { quiet: true, width: 0 });
        bands.push({ series: [out.length - 1, out.length], fill: pale(color, 0.16) });
      }
      const mean = smooth > 1 && line.noisy !== false && line.values.length > smooth;
      if (mean) add(line.values, { quiet: true, width: 1, stroke: pale(color, 0.3) });
      add(mean ? smoothed(line.values, smooth) : line.values, { width: 1.8, dash: line.dash, raw: line });
    }
    return { out, bands };
  }

  draw() {
    const width = this.canvas.clientWidth;
    const points = this.state.lines.reduce((n, l) => n + l.values.filter((v) => v !== null && v !== undefined).length, 0);
    this.card.dataset.points = points;
    this.canvas.setAttribute("aria-label", this.words());
    this.keys();
    if (!width) return;
    const { out, bands } = this.series(), { steps, columns } = aligned(out);
    const log = this.isLog() && columns.some((c) => c.some((v) => v > 0));
    this.logButton.setAttribute("aria-pressed", this.isLog());
    const data = [steps, ...columns.map((c) => (log ? c.map((v) => (v > 0 ? v : v === undefined ? undefined : null)) : c))];
    const shape = JSON.stringify([out.map((s) => [s.line, s.stroke, s.width, s.dash]), log, steps.length < DOTS]);
    if (this.plot && this.shape === shape && this.plot.width === width) {
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.shape = shape;
    this.canvas.replaceChildren();
    this.plot = new uPlot(this.options(width, out, bands, log, steps.length < DOTS), data, this.canvas);
  }

  options(width, out, bands, log, few) {
    const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: get("--dim"), grid: { stroke: get("--line"), width: 1 }, ticks: { show: false }, font: "11.5px system-ui, sans-serif" };
    const { percent, zero, bounds } = this.spec;
    const range = (_, low, high) => {
      if (low === null) return [0, 1];
      if (zero && low > 0) low = 0;
      const room = 0.06 * (high - low || Math.abs(high) || 1);
      let [a, b] = [zero && low === 0 ? 0 : low - room, high + room];
      if (bounds) [a, b] = [Math.max(a, low >= bounds[0] ? bounds[0] : a), Math.min(b, high <= bounds[1] ? bounds[1] : b)];
      return a < b ? [a, b] : [a - 1, b + 1];
    };
    return {
      width, height: HEIGHT, legend: { show: false }, padding: [8, 10, 0, 0],
      cursor: { sync: { key: sync.key }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range } },
      series: [{}, ...out.map((s) => ({
        stroke: s.stroke, width: s.width, dash: s.dash, spanGaps: false, points: { show: few && !s.quiet, size: 5, fill: s.stroke } }))],
      bands,
      axes: [
        { ...axis, size: 28, values: (_, found) => found.map((v) => short(v)) },
        { ...axis, size: 52, values: (_, found) => found.map((v) => (v === null ? "" : short(v, percent))) }],
      hooks: { setCursor: [(plot) => this.read(plot.cursor.idx, plot)] },
    };
  }

  read(index, plot) {
    const there = index !== null && index !== undefined;
    this.at.textContent = there ? `${this.state.xName ?? "step"} ${short(plot.data[0][index])}` : "";
    for (const [number, line] of this.state.lines.entries()) {
      const place = there ? line.steps.indexOf(plot.data[0][index]) : lastOf(line.values);
      const value = place >= 0 ? line.values[place] : null, low = line.low?.[place], high = line.high?.[place];
      const edges = low !== null && low !== undefined ? ` [${short(low, this.spec.percent)}, ${short(high, this.spec.percent)}]` : "";
      const shown = this.legend.children[number]?.querySelector("b");
      if (shown) shown.textContent = there && place < 0 ? "" : short(value, this.spec.percent) + edges;
    }
  }

  keys() {
    const names = JSON.stringify(this.state.lines.map((l) => [l.name, l.color]));
    if (this.named !== names) {
      this.named = names;
      this.legend.classList.toggle("many", this.state.lines.length > MANY_LINES);
      this.legend.replaceChildren(...this.state.lines.map((line, number) => {
        const made = h("button", { type: "button", class: `key-button${line.dash ? " dashed" : ""}`, "aria-pressed": !this.hidden.has(line.name), title: `show or hide ${line.name}`,
          onclick: () => {
            if (!this.hidden.delete(line.name)) this.hidden.add(line.name);
            made.setAttribute("aria-pressed", !this.hidden.has(line.name));
            this.draw();
          } }, h("i"), h("span", {}, line.name), h("b"));
        made.style.setProperty("--c", variable(line.color ?? number));
        return made;
      }));
    }
    this.read(null, null);
  }

  words() {
    const parts = this.state.lines.slice(0, 8).map((l) => {
      const last = lastOf(l.values);
      return last < 0 ? `${l.name}: no value` : `${l.name}: ${short(l.values[last], this.spec.percent)} at ${this.state.xName ?? "step"} ${short(l.steps[last])}`;
    });
    return `${this.spec.title}. ${parts.join("; ")}`;
  }

  // The drawing with its title and legend on the page's colour.
  download() {
    if (!this.plot) return;
    const from = this.plot.ctx.canvas, scale = from.width / this.plot.width, head = 46 * scale;
    const made = h("canvas"), style = getComputedStyle(document.documentElement);
    Object.assign(made, { width: from.width, height: from.height + head });
    const pen = made.getContext("2d");
    pen.fillStyle = style.getPropertyValue("--card").trim();
    pen.fillRect(0, 0, made.width, made.height);
    pen.drawImage(from, 0, head);
    pen.fillStyle = style.getPropertyValue("--ink").trim();
    pen.font = `600 ${14 * scale}px system-ui, sans-serif`;
    pen.fillText(`${this.spec.title}${this.spec.unit ? ` (${this.spec.unit})` : ""}`, 12 * scale, 18 * scale);
    pen.font = `${12 * scale}px system-ui, sans-serif`;
    let x = 12 * scale;
    for (const [number, line] of this.state.lines.entries()) {
      if (this.hidden.has(line.name)) continue;
      pen.fillStyle = colorOf(line.color ?? number);
      pen.fillRect(x, 31 * scale, 14 * scale, 3 * scale);
      pen.fillStyle = style.getPropertyValue("--ink").trim();
      pen.fillText(line.name, x + 19 * scale, 36 * scale);
      x += 19 * scale + pen.measureText(line.name).width + 16 * scale;
    }
    const name = this.spec.title.replaceAll(/[^A-Za-z0-9_-]+/g, "_");
    made.toBlob((data) => save(data, `${name}.png`), "image/png");
  }
}

export function save(data, name) {
  const place = URL.createObjectURL(data), made = h("a", { href: place, download: name });
  made.click();
  setTimeout(() => URL.revokeObjectURL(place), 10_000);
}

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return i;
  return -1;
}
