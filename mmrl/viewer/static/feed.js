// The metrics of one run as columns that grow: asks for what is new, from the beginning where the file was replaced.

import { ask } from "./base.js";

const BATCH = 100; // names per request

export class Feed {
  constructor(key) {
    this.key = key;
    this.names = new Set();
    this.steps = [];
    this.series = {};
    this.next = 0;
    this.generation = null;
    this.version = null;
    this.status = "";
    this.step = 0;
    this.columns = 0; // metrics that the run has; more of them mean more charts
  }

  // More metrics are wanted; the next `grow` fetches all of them from the beginning.
  want(names) {
    const fresh = names.filter((n) => !this.names.has(n));
    for (const name of fresh) this.names.add(name);
    if (fresh.length) this.next = 0;
  }

  // Returns whether anything changed.
  async grow() {
    const names = [...this.names], parts = [];
    for (let i = 0; i < Math.max(1, names.length); i += BATCH) parts.push(names.slice(i, i + BATCH));
    const start = parts.length > 1 ? 0 : this.next; // rows are thinned for the names of a request
    const whole = start === 0 || this.generation === null;
    const query = { run: this.key, from: start };
    if (!whole) query.generation = this.generation;
    const answers = await Promise.all(parts.map((part) => ask("/api/metrics", { ...query, names: part })));
    const [first] = answers;
    const changed = first.next !== this.next || first.generation !== this.generation || first.status !== this.status || first.version !== this.version;
    Object.assign(this, { version: first.version, status: first.status, step: first.step, columns: first.columns, generation: first.generation, next: first.next });
    if (answers.length > 1) this.replace(merged(answers));
    else if (first.from === 0) this.replace(first);
    else this.append(first);
    return changed || whole;
  }

  replace({ steps, series }) {
    this.steps = steps;
    this.series = series;
  }

  append({ steps, series }) {
    const before = this.steps.length;
    for (const [name, values] of Object.entries(series)) {
      this.series[name] ??= new Array(before).fill(null);
      this.series[name].push(...values);
    }
    this.steps.push(...steps);
    for (const values of Object.values(this.series)) while (values.length < this.steps.length) values.push(null);
  }
}

function merged(answers) {
  const steps = [...new Set(answers.flatMap((a) => a.steps))].sort((a, b) => a - b), place = new Map(steps.map((s, i) => [s, i]));
  const series = {};
  for (const answer of answers) {
    for (const [name, values] of Object.entries(answer.series)) {
      const out = (series[name] = new Array(steps.length).fill(null));
      answer.steps.forEach((s, i) => { out[place.get(s)] = values[i]; });
    }
  }
  return { steps, series };
}

// The mean of each value and those before it; gaps stay gaps.
export function smoothed(values, width) {
  const out = new Array(values.length).fill(null), kept = [];
  let sum = 0;
  for (let i = 0; i < values.length; i++) {
    const v = values[i];
    if (v === null || v === undefined) continue;
    kept.push(v);
    sum += v;
    if (kept.length > width) sum -= kept[kept.length - width - 1];
    out[i] = sum / Math.min(width, kept.length);
  }
  return out;
}

// One list of steps for lines of several runs, and each line's values beside it.
export function aligned(lines) {
  const steps = [...new Set(lines.flatMap((l) => l.steps))].sort((a, b) => a - b), place = new Map(steps.map((s, i) => [s, i]));
  return {
    steps,
    columns: lines.map((line) => {
      const out = new Array(steps.length).fill(undefined); // undefined: this line has no such step; null: a gap
      line.steps.forEach((s, i) => { out[place.get(s)] = line.values[i] ?? null; });
      return out;
    }),
  };
}
