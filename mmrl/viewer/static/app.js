// The router: which part of the page an address shows, light and dark, and where one is.

import { h, here, link, message } from "./base.js";
import { showCompare } from "./compare.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";

const problems = [];
for (const kind of ["error", "unhandledrejection"]) {
  window.addEventListener(kind, (event) => {
    problems.push(event.message ?? event.reason?.message ?? String(event.reason));
    document.body.dataset.errors = problems.join(" | ");
  });
}

const PARTS = { "/": showRuns, "/run": showRun, "/compare": showCompare };
const content = document.getElementById("content"), where = document.getElementById("where");
let shown = "", part = null;

function identity({ path, query }) {
  return path + JSON.stringify(path === "/run" ? [query.get("key"), query.get("tab")] : path === "/compare" ? [query.getAll("run"), query.get("tab")] : []);
}

async function route() {
  const place = here(), name = identity(place);
  if (name === shown) {
    part?.update?.();
    return;
  }
  shown = name;
  part?.close?.();
  part = null;
  document.getElementById("live").textContent = "";
  const show = PARTS[place.path];
  where.replaceChildren(...trail(place));
  document.title = [place.query.get("key"), place.path === "/compare" ? "comparison" : "", "mmrl view"].filter(Boolean).join(" · ");
  if (!show) {
    content.replaceChildren(message("There is nothing at this address."), h("p", {}, h("a", { href: "#/" }, "All runs")));
    return;
  }
  const place_ = h("div", { class: "part" });
  try {
    const made = await show(place_, place);
    if (shown !== name) {
      made?.close?.();
      return;
    }
    part = made;
    content.replaceChildren(place_);
    made?.shown?.();
  } catch (problem) {
    if (shown !== name) return;
    shown = "";
    content.replaceChildren(message(problem instanceof TypeError ? "The viewer does not answer." : problem.message, "problem"));
  }
  document.body.dataset.ready = name;
}

function trail({ path, query }) {
  if (path === "/run") return [h("span", { "aria-hidden": "true" }, "/"), h("span", { class: "now" }, query.get("key") ?? "")];
  if (path === "/compare") return [h("span", { "aria-hidden": "true" }, "/"), h("a", { href: link("/compare", { run: query.getAll("run") }) }, "comparison")];
  return [];
}

function dark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

document.querySelector(".theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  try {
    localStorage.setItem("theme", document.documentElement.dataset.theme);
  } catch { /* a browser that keeps nothing: the choice holds for this page */ }
  window.dispatchEvent(new Event("themechange"));
});
try {
  const kept = localStorage.getItem("theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
} catch { /* the same */ }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("themechange")));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  content.focus();
});
window.addEventListener("hashchange", route);
window.addEventListener("statechange", route);
route();
