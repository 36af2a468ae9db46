// A picture or frame at its full resolution, with what is drawn over it: wheel, buttons, keys and dragging move it.

import { h } from "./base.js";

let shown = null;

function dialog() {
  const stage = h("div", { class: "stage", tabindex: "0", role: "img" });
  const state = { scale: 1, x: 0, y: 0, svg: null };
  const place = () => {
    if (state.svg) state.svg.style.transform = `translate(${state.x}px, ${state.y}px) scale(${state.scale})`;
    label.textContent = `${Math.round(100 * state.scale)} %`;
  };
  const zoom = (factor, x = stage.clientWidth / 2, y = stage.clientHeight / 2) => {
    const next = Math.min(40, Math.max(0.2, state.scale * factor)), by = next / state.scale;
    state.x = x - (x - state.x) * by;
    state.y = y - (y - state.y) * by;
    state.scale = next;
    place();
  };
  const fit = () => {
    Object.assign(state, { scale: 1, x: 0, y: 0 });
    place();
  };
  const label = h("output", { "aria-label": "zoom" }, "100 %");
  const marks = h("button", { type: "button", "aria-pressed": "true", onclick: () => {
    const off = made.classList.toggle("bare");
    marks.setAttribute("aria-pressed", !off);
  } }, "boxes");
  const made = h("dialog", { class: "zoom", "aria-label": "picture at full resolution" },
    h("div", { class: "zoom-bar" }, h("span", { class: "zoom-name" }),
      h("button", { type: "button", "aria-label": "smaller", onclick: () => zoom(1 / 1.4) }, "−"), label,
      h("button", { type: "button", "aria-label": "larger", onclick: () => zoom(1.4) }, "+"),
      h("button", { type: "button", onclick: fit }, "fit"), marks,
      h("button", { type: "button", class: "zoom-close", onclick: () => made.close() }, "close")), stage);
  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = stage.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 400), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });
  let held = null;
  stage.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX - state.x, y: event.clientY - state.y };
    stage.setPointerCapture(event.pointerId);
  });
  stage.addEventListener("pointermove", (event) => {
    if (!held) return;
    state.x = event.clientX - held.x;
    state.y = event.clientY - held.y;
    place();
  });
  for (const end of ["pointerup", "pointercancel"]) stage.addEventListener(end, () => { held = null; });
  made.addEventListener("keydown", (event) => {
    const keys = { "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: fit,
      ArrowLeft: () => { state.x += 60; place(); }, ArrowRight: () => { state.x -= 60; place(); },
      ArrowUp: () => { state.y += 60; place(); }, ArrowDown: () => { state.y -= 60; place(); } };
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      keys[event.key]();
    }
  });
  document.body.append(made);
  return { made, stage, state, fit };
}

// `svg` is the small drawing; `href` its picture at full resolution.
export function zoomInto(svg, href, name) {
  shown ??= dialog();
  const copy = svg.cloneNode(true);
  copy.querySelector("image")?.setAttribute("href", href);
  copy.removeAttribute("role");
  copy.removeAttribute("aria-label");
  copy.setAttribute("aria-hidden", "true");
  shown.state.svg = copy;
  shown.stage.setAttribute("aria-label", name);
  shown.stage.replaceChildren(copy);
  shown.made.querySelector(".zoom-name").textContent = name;
  shown.made.showModal();
  shown.fit();
  shown.stage.focus();
}

// Every drawing in `figure` opens when it is clicked, or with Enter; `hrefOf(second)` is the address of a frame, of the picture
// without one.
export function openable(figure, hrefOf) {
  for (const svg of figure.querySelectorAll("svg")) {
    if (!svg.querySelector("image")) continue;
    const caption = svg.closest("figure")?.querySelector("figcaption")?.textContent ?? "";
    const second = /^[\d.]+ s$/.test(caption) ? caption.slice(0, -2) : null;
    const name = svg.getAttribute("aria-label") ?? "picture";
    const open = () => zoomInto(svg, hrefOf(second), name);
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("role", "button");
    svg.setAttribute("aria-label", `${name}: open at full resolution`);
    svg.classList.add("openable");
    svg.addEventListener("click", open);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        open();
      }
    });
  }
}
