"use strict";
// Read-out under the pointer, the gallery's slider, light and dark. The page is complete and readable without it.
const problems = [];
window.addEventListener("error", (event) => {
  problems.push(event.message);
  document.body.dataset.errors = problems.join(" | ");
});

function short(value, percent) {
  if (value === null || value === undefined) return "–";
  const v = percent ? 100 * value : value, size = Math.abs(v);
  let text;
  if (size === 0) text = "0";
  else if (size >= 1e7 || size < 1e-4) text = v.toExponential(1);
  else if (size >= 1000) text = Math.round(v).toLocaleString("en-US");
  else text = String(Number(v.toPrecision(3)));
  return text.replaceAll("-", "−") + (percent ? " %" : "");
}

function element(tag, text, color) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (color) made.style.setProperty("--c", `var(--${color})`);
  return made;
}

function nearest(xs, x) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
  return best;
}

const charts = [...document.querySelectorAll("figure.chart")].map((figure) => {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const find = (name) => figure.querySelector(name);
  return { figure, data, canvas: find(".canvas"), cross: find(".cross"), readout: find(".readout"), at: null,
           xs: [...new Set(data.s.flatMap((line) => line.x))].sort((a, b) => a - b) };
});

function placeCross(chart, x) {
  const share = (x - chart.data.x0) / (chart.data.x1 - chart.data.x0);
  chart.cross.hidden = !(share >= -0.001 && share <= 1.001);
  chart.cross.style.left = `${100 * share}%`;
  return share;
}

function fillReadout(chart, x) {
  const unit = chart.data.unit === "step" ? `step ${x.toLocaleString("en-US")}` : `${short(x)} ${chart.data.unit}`;
  const rows = [element("div", unit)];
  let sum = 0;
  for (const line of chart.data.s) {
    const i = nearest(line.x, x);
    if (line.x[i] !== x) continue;
    const row = element("div"), value = line.v[i], low = line.lo?.[i], high = line.hi?.[i];
    let words = short(value, chart.data.pct);
    if (low !== undefined && low !== null && high !== null) words += ` [${short(low, chart.data.pct)}, ${short(high, chart.data.pct)}]`;
    if (line.e?.[i]) words += ` ${line.e[i]}`;
    row.append(element("i", "", line.c), element("span", line.n), element("b", words));
    rows.push(row);
    sum += value ?? 0;
  }
  if (chart.data.sum) {
    const row = element("div");
    row.append(element("span", "sum"), element("b", short(sum)));
    rows.push(row);
  }
  chart.readout.replaceChildren(...rows);
}

function show(chart, x) {
  const step = chart.xs[nearest(chart.xs, x)];
  chart.at = step;
  for (const other of charts) if (other.data.unit === chart.data.unit) placeCross(other, step);
  const share = placeCross(chart, step);
  fillReadout(chart, step);
  chart.readout.hidden = false;
  const left = share * chart.canvas.clientWidth, width = chart.readout.offsetWidth;
  const side = left + 12 + width > chart.canvas.clientWidth ? Math.max(-30, left - width - 12) : left + 12;
  chart.readout.style.left = `${side}px`;
}

function hide(chart) {
  chart.readout.hidden = true;
  for (const other of charts) other.cross.hidden = true;
}

for (const chart of charts) {
  const { canvas, figure, data } = chart;
  const follow = (event) => {
    const box = canvas.getBoundingClientRect();
    show(chart, data.x0 + (event.clientX - box.left) / box.width * (data.x1 - data.x0));
  };
  canvas.addEventListener("pointermove", follow);
  canvas.addEventListener("pointerdown", follow);
  canvas.addEventListener("pointerleave", () => hide(chart));
  figure.addEventListener("blur", () => hide(chart));
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const i = chart.at === null ? (move > 0 ? -1 : chart.xs.length) : chart.xs.indexOf(chart.at);
    show(chart, chart.xs[Math.min(chart.xs.length - 1, Math.max(0, i + move))]);
  });
}

for (const gallery of document.querySelectorAll(".gallery")) {
  const range = gallery.querySelector("input[type=range]"), states = [...gallery.querySelectorAll(".state")];
  gallery.querySelector(".samples")?.addEventListener("change", (event) => {
    gallery.classList.toggle("no-samples", !event.target.checked);
  });
  if (!range) continue;
  const steps = range.dataset.steps.split(" "), output = gallery.querySelector("output"), play = gallery.querySelector(".play");
  const update = () => {
    for (const state of states) state.toggleAttribute("hidden", state.dataset.step !== range.value);
    output.textContent = `step ${Number(steps[range.value]).toLocaleString("en-US")}`;
  };
  range.addEventListener("input", update);
  update();
  let timer = null;
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "▶"; };
  play.addEventListener("click", () => {
    if (timer !== null) return stop();
    if (range.value === range.max) range.value = 0;
    update();
    play.textContent = "❚❚";
    timer = setInterval(() => {
      range.value = Number(range.value) + 1;
      update();
      if (range.value === range.max) stop();
    }, 700);
  });
}

document.querySelector(".theme")?.addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme ?? (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});

document.body.dataset.charts = charts.length;
document.body.dataset.ready = problems.length === 0 ? "true" : "false";
