// What every part of the page uses: elements, requests, the address, numbers as text.

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value") made.value = value;
    else if (name === "checked") made.checked = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return made;
}

// HTML that the server made from escaped text with the report's own functions; the page's policy runs no script in it.
export function fromServer(html) {
  const made = document.createElement("template");
  made.innerHTML = html;
  return made.content;
}

export function address(path, query) {
  const made = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== "" && one !== null && one !== undefined) made.append(name, one);
  }
  const text = made.toString();
  return text ? `${path}?${text}` : path;
}

export async function ask(path, query = {}, signal = undefined) {
  const answer = await fetch(address(path, query), { signal });
  const found = await answer.json().catch(() => ({ error: `status ${answer.status}` }));
  if (!answer.ok) throw new Error(found.error ?? `status ${answer.status}`);
  return found;
}

// The state of the page is its address: #/run?key=demo&tab=samples&mode=greedy
export function here() {
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  return { path: path || "/", query: new URLSearchParams(query ?? "") };
}

export function link(path, query) {
  return `#${address(path, query)}`;
}

// The address with some parameters changed ("" removes one); `push` makes it a step of the browser's history.
export function change(changes, push = false) {
  const { path, query } = here();
  for (const [name, value] of Object.entries(changes)) {
    query.delete(name);
    for (const one of Array.isArray(value) ? value : [value]) if (one !== "" && one !== null) query.append(name, one);
  }
  const text = query.toString(), next = `#${path}${text ? `?${text}` : ""}`;
  if (next === location.hash) return;
  if (push) location.hash = next;
  else {
    history.replaceState(null, "", next);
    window.dispatchEvent(new Event("statechange"));
  }
}

export function short(value, percent = false) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const v = percent ? 100 * value : value, size = Math.abs(v);
  let text;
  if (size === 0) text = "0";
  else if (size >= 1e7 || size < 1e-4) text = v.toExponential(1);
  else if (size >= 1000) text = Math.round(v).toLocaleString("en-US");
  else text = String(Number(v.toPrecision(3)));
  return text.replaceAll("-", "−") + (percent ? " %" : "");
}

export function interval(found, signed = false) {
  if (!found || found.mean === null || found.mean === undefined) return ["–", ""];
  const { mean, low, high } = found;
  const digits = Math.abs(mean) >= 10 ? 1 : 3;
  const words = (v) => ((signed && v >= 0 ? "+" : "") + v.toFixed(digits)).replace("-", "−");
  return [words(mean), low === null || low === undefined || high === null ? "" : `[${words(low)}, ${words(high)}]`];
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 72 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.round(hours / 24)} days`;
}

export function when(seconds) {
  if (!seconds) return "–";
  const day = new Date(1000 * seconds), two = (n) => String(n).padStart(2, "0");
  return `${day.getFullYear()}-${two(day.getMonth() + 1)}-${two(day.getDate())} ${two(day.getHours())}:${two(day.getMinutes())}`;
}

// The last two parts of a path: what a model's folder, or its name on the Hub, is called.
export function modelName(path) {
  return path.split("/").filter(Boolean).slice(-2).join("/");
}

export function plural(count, noun, many = `${noun}s`) {
  return `${count.toLocaleString("en-US")} ${count === 1 ? noun : many}`;
}

export function message(words, kind = "missing") {
  return h("p", { class: kind, role: kind === "problem" ? "alert" : null }, words);
}

export const STATUS = { running: "busy", finished: "good", stopped: "", failed: "bad", stale: "bad", unknown: "" };

export function chip(status, title = "") {
  return h("span", { class: `chip in-table ${STATUS[status] ?? ""}`, title: title || null }, status);
}

// Calls `work` again and again, `seconds` after it ended, while the page is visible; returns what stops it.
export function every(seconds, work) {
  let stopped = false, timer = 0;
  const turn = async () => {
    if (!document.hidden) {
      try {
        await work();
        document.getElementById("live").classList.remove("lost");
      } catch (problem) {
        if (stopped) return;
        const note = document.getElementById("live");
        note.classList.add("lost");
        note.textContent = problem instanceof TypeError ? "the viewer does not answer" : problem.message;
      }
    }
    if (!stopped) timer = setTimeout(turn, 1000 * seconds);
  };
  timer = setTimeout(turn, 1000 * seconds);
  return () => {
    stopped = true;
    clearTimeout(timer);
  };
}

export function later(milliseconds, work) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), milliseconds);
  };
}

// What is typed into `field` becomes the parameter `name` of the address: after a pause, or when the field is left.
export function typed(field, milliseconds, name, beside = {}) {
  const set = () => {
    if (field.value !== (here().query.get(name) ?? "")) change({ ...beside, [name]: field.value });
  };
  field.addEventListener("input", later(milliseconds, set));
  field.addEventListener("change", set);
}

export function say(words) {
  document.getElementById("live").textContent = words;
}
