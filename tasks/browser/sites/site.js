// What all pages share: seeded choice, the goal, and the episode's state. A page calls site.page(make): make(choose, say) builds the
// page anew from the seed's choices and returns the goal in words. site.step(n, of) says how much of the goal is reached,
// site.end(won) ends the episode; nothing that follows counts.
const site = (() => {
  let make = null, state = { done: false, reward: 0, progress: 0 }, letters = () => 0;
  const hash = (text) => [...text].reduce((h, c) => Math.imul(h ^ c.codePointAt(0), 16777619) >>> 0, 2166136261);
  const random = (seed) => { // mulberry32
    let a = hash(seed);
    return () => {
      a = (a + 0x6d2b79f5) >>> 0;
      let t = Math.imul(a ^ (a >>> 15), a | 1);
      t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
  };
  const choose = {
    number: (low, high) => low + Math.floor(letters() * (high - low + 1)),
    one: (items) => items[Math.floor(letters() * items.length)],
    some: (items, count) => {
      const left = [...items], out = [];
      while (out.length < count && left.length) out.push(left.splice(Math.floor(letters() * left.length), 1)[0]);
      return out;
    },
    order: (items) => choose.some(items, items.length),
  };
  return {
    page: (builder) => { make = builder; },
    begin: (seed) => {
      letters = random(`${location.pathname}:${seed}`);
      state = { done: false, reward: 0, progress: 0 };
      document.body.innerHTML = '<div id="goal"></div><div id="page"></div>';
      const goal = make(document.getElementById("page"), choose);
      document.getElementById("goal").textContent = goal;
      return goal;
    },
    judge: () => ({ ...state }),
    step: (reached, of) => { if (!state.done) state.progress = Math.max(0, Math.min(1, reached / of)); },
    end: (won) => {
      if (state.done) return;
      state = { done: true, reward: won ? 1 : 0, progress: won ? 1 : state.progress };
      document.getElementById("page").innerHTML = '<div class="done">Thank you.</div>';
    },
    element: (kind, text = "", attributes = {}) => {
      const made = document.createElement(kind);
      made.textContent = text;
      for (const [name, value] of Object.entries(attributes)) name.startsWith("on") ? made.addEventListener(name.slice(2), value) : made.setAttribute(name, value);
      return made;
    },
  };
})();
const h = site.element;
const row = (...parts) => { const made = h("div", "", { class: "row" }); made.append(...parts); return made; };
const NAMES = ["Ada", "Ben", "Chen", "Dora", "Emil", "Fatou", "Goro", "Hana", "Ivan", "Jana", "Kofi", "Lena"];
const CITIES = ["Oslo", "Lima", "Kyoto", "Accra", "Quito", "Turin", "Delhi", "Cairo", "Porto", "Perth"];
const GOODS = ["lamp", "chair", "kettle", "clock", "radio", "rug", "mirror", "vase", "desk", "fan"];
