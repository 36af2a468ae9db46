// One row whole: its picture, clip or episode, the prompt, every turn, the score, its group, and the same prompt in other steps.

import { address, fromServer, h, here, link, plural, short } from "./base.js";
import { openable } from "./zoom.js";

function media(key, table, found) {
  const at = { run: key, table, row: found.row }, figure = h("div", { class: "figure" });
  if (found.episode) {
    figure.append(h("video", { controls: true, loop: true, muted: true, playsinline: true, preload: "metadata", src: address("/api/episode", at), "aria-label": `episode ${found.id}` }),
      h("div", { class: "strip-place" }, fromServer(found.strip)));
    return figure;
  }
  if (!found.images && !found.clip) return found.strip ? h("div", { class: "figure-place" }, fromServer(found.strip)) : null;
  figure.append(fromServer(found.figure));
  openable(figure, (second) => (second === null ? address("/api/picture", { ...at, size: "full" }) : address("/api/frame", { ...at, t: second })));
  if (found.images > 1) {
    figure.append(h("div", { class: "others" }, Array.from({ length: Math.min(found.images, 16) }, (_, i) =>
      h("a", { href: address("/api/picture", { ...at, i, size: "full" }), target: "_blank", rel: "noopener" }, h("img", { src: address("/api/picture", { ...at, i }), alt: `picture ${i + 1} of ${found.images}`, loading: "lazy" })))));
  }
  if (found.strip) figure.append(fromServer(found.strip));
  const others = found.group.length > 1;
  return h("div", { class: "figure-place" }, figure, h("p", { class: "note legend" },
    h("span", { class: "key box gold" }), "gold", h("span", { class: "key box greedy" }), "this answer",
    others ? h("label", {}, h("input", { type: "checkbox", checked: true, class: "samples", onchange: (event) => figure.classList.toggle("no-samples", !event.target.checked) }), h("span", { class: "key box sampled" }), "others of its group") : null));
}

function texts(found) {
  if (found.said) return [h("p", {}, found.said)];
  const turns = found.turn_texts.length ? found.turn_texts : [found.text];
  return [
    h("h3", {}, "Prompt"), h("pre", { class: "whole", dir: "auto", tabindex: "0" }, found.question || "(no question)"),
    found.prompt && found.prompt !== "{question}" ? h("details", {}, h("summary", {}, "template it was put into"), h("pre", { class: "whole", tabindex: "0" }, found.prompt)) : null,
    h("h3", {}, turns.length > 1 ? plural(turns.length, "turn") : "Answer"),
    ...turns.map((text, i) => h("div", { class: "turn" }, turns.length > 1 ? h("span", { class: "turn-name" }, `turn ${i + 1}`) : null,
      text ? h("pre", { class: "whole", dir: "auto", tabindex: "0" }, text) : h("p", { class: "dim" }, "empty answer"))),
  ];
}

function scores(found) {
  const { parts = {}, weights = {}, metrics = {} } = found.score;
  const rows = [...Object.entries(parts).map(([n, v]) => [n, short(v), weights[n] === undefined ? "" : `× ${short(weights[n])}`]), ...Object.entries(metrics).map(([n, v]) => [n, short(v), "metric"])];
  return rows.length ? [h("h3", {}, "Score"), h("table", { class: "scores" }, h("tbody", {}, rows.map(([n, v, w]) => h("tr", {}, h("th", { scope: "row" }, n), h("td", { class: "num" }, v), h("td", { class: "dim" }, w)))))] : [];
}

// A link to another row of the table, with the filters as they are.
function rowLink(row, words, more = {}) {
  const { path, query } = here(), next = Object.fromEntries([...new Set(query.keys())].map((k) => [k, query.getAll(k)]));
  return h("a", { href: link(path, { ...next, row }), ...more }, words);
}

function group(found) {
  if (found.group.length < 2) return [];
  return [h("h3", {}, `Its group: ${plural(found.group.length, "answer")}`), h("div", { class: "chips" }, found.group.map((m) =>
    rowLink(m.row, `${m.parsed ? "" : "✕ "}${short(m.reward)}`, { class: `value${m.parsed ? "" : " bad"}${m.contrast ? " changed" : ""}`, "aria-current": m.row === found.row ? "true" : null,
      title: `${m.mode}${m.contrast ? ", on changed input" : ""}` })))];
}

function past(found) {
  if (found.past.length < 2) return [];
  const { path, query } = here();
  return [h("h3", {}, "The same prompt through training"), h("div", { class: "chips" }, found.past.map(([step, mean, row]) =>
    rowLink(row, [h("span", { class: "dim" }, `${step}: `), short(mean)], { class: "value", "aria-current": step === found.step ? "true" : null, title: `mean reward at step ${step}` }))),
  h("p", { class: "note" }, h("a", { href: link(path, { key: query.get("key"), tab: "samples", table: query.get("table") ?? "", unit: found.unit, row: found.row }) }, "list only this prompt"))];
}

export function detail(key, table, found, { step, close }) {
  const title = [`step ${found.step}`, found.source, found.task !== found.source ? found.task : "", found.mode].filter(Boolean).join(" · ");
  const badges = [
    found.parsed ? h("span", { class: "badge" }, `reward ${short(found.reward)}`) : h("span", { class: "badge bad" }, `not parsed: ${found.reason_words.slice(0, 200) || "no reason"}`),
    found.metric ? h("span", { class: "badge" }, `${found.metric[0]} ${short(found.metric[1])}`) : null,
    found.stop ? h("span", { class: `badge ${found.stop === "length" ? "bad" : "soft"}` }, found.stop === "length" ? "cut by length" : `ended by ${found.stop}`) : null,
    found.tokens === null ? null : h("span", { class: "badge soft" }, plural(found.tokens, "token")),
    found.contrast ? h("span", { class: "badge bad" }, `on changed input: ${found.view}`) : null,
    found.offline ? h("span", { class: "badge soft" }, "demonstration") : null,
  ];
  return h("article", { class: "card" },
    h("div", { class: "detail-bar" }, h("button", { type: "button", onclick: close, class: "back" }, "Back to the list"),
      h("button", { type: "button", "aria-label": "previous row", onclick: () => step(-1) }, "↑"), h("button", { type: "button", "aria-label": "next row", onclick: () => step(1) }, "↓"),
      h("span", { class: "dim" }, `row ${found.row.toLocaleString("en-US")}`)),
    h("h2", { class: "small" }, found.id || "sample"), h("p", { class: "tag" }, title), h("p", { class: "badges" }, badges.filter(Boolean)),
    media(key, table, found) ?? "", fromServer(found.texts), ...texts(found).filter(Boolean), ...group(found), ...past(found), ...scores(found),
    h("details", {}, h("summary", {}, "The row as it was logged"), h("pre", { class: "code", tabindex: "0" }, found.raw + (found.raw_cut ? "\n… cut: the file has the rest" : ""))));
}
