/**
 * What is known of the past: documents of `/v1/state/timeline` put together, and samples taken while
 * the page is open. Times are seconds after the engine's beginning.
 */

/** Steps, requests and samples that are kept, at most; the oldest go first. */
const STEPS = 20000;
const LANES = 5000;
const SAMPLES = 1800;

export class TimeModel {
  constructor() {
    this.clear();
  }

  /** Forget everything: another process answers. */
  clear() {
    this.epoch = 0;
    this.now = 0;
    /** Number of the last step. */
    this.step = 0;
    /** @type {{number: number, start: number, stop: number, decodes: number, prefills: number, generated: number, free: number, running: number, waiting: number, preemptions: number, schedule: number, model: number}[]} */
    this.steps = [];
    /** @type {Map<number, object>} documents of requests by number */
    this.requests = new Map();
    /** @type {Map<number, number[]>} times at which pieces of prompts began, by request */
    this.chunks = new Map();
    /** @type {Map<number, number>} rows of packed lanes */
    this.places = new Map();
    /** @type {{time: number, latencies: object, rate: number | null}[]} */
    this.samples = [];
    /** @type {{reading: number, time: number, use: Record<string, number>}[]} */
    this.uses = [];
    this.pagesTotal = 0;
    this.last = null;
  }

  /**
   * Take in a document.
   * @param {any} document
   */
  add(document) {
    if (document.epoch !== this.epoch || document.step < this.step) {
      const uses = document.epoch === this.epoch ? this.uses : [];
      this.clear();
      this.uses = uses;
    }
    this.epoch = document.epoch;
    this.now = document.now;
    this.last = document;
    this.pagesTotal = document.pages.total;
    const { steps } = document;
    const starts = new Map();
    steps.number.forEach((number, at) => {
      if (number <= this.step) return;
      starts.set(number, steps.start[at]);
      this.steps.push({
        number,
        start: steps.start[at],
        stop: steps.start[at] + steps.seconds[at],
        schedule: steps.schedule_seconds[at],
        model: steps.model_seconds[at],
        decodes: steps.decodes[at],
        prefills: steps.tokens[at] - steps.decodes[at],
        generated: steps.generated[at],
        free: steps.pages_free[at],
        running: steps.running[at],
        waiting: steps.waiting[at],
        preemptions: steps.preemptions[at],
      });
    });
    for (const [number, lane] of document.prefills) {
      if (!starts.has(number)) continue;
      if (!this.chunks.has(lane)) this.chunks.set(lane, []);
      this.chunks.get(lane).push(starts.get(number));
    }
    for (const request of document.requests) this.requests.set(request.number, request);
    this.step = Math.max(this.step, document.step);
    this.samples.push({ time: this.now, latencies: document.latencies, rate: document.drafts.rate });
    this.trim();
  }

  /**
   * Note the use of pages.
   * @param {number} reading of which reading it is; each counts once
   * @param {number} time Unix time
   * @param {Record<string, number>} use numbers of pages by owner
   */
  addUse(reading, time, use) {
    if (this.uses.at(-1)?.reading === reading) return;
    this.uses.push({ reading, time, use });
    if (this.uses.length > SAMPLES) this.uses.shift();
  }

  trim() {
    if (this.steps.length > STEPS) this.steps.splice(0, this.steps.length - STEPS);
    if (this.samples.length > SAMPLES) this.samples.shift();
    for (const number of this.requests.keys()) {
      if (this.requests.size <= LANES) break;
      this.requests.delete(number);
      this.chunks.delete(number);
      this.places.delete(number);
    }
  }

  /** Time of the earliest that is known. */
  get first() {
    let first = this.steps[0]?.start ?? this.now;
    for (const { arrival } of this.requests.values()) first = Math.min(first, arrival);
    return first;
  }

  /**
   * Return the step that ran at a time, or null.
   * @param {number} time
   */
  stepAt(time) {
    const step = this.steps[lowerBound(this.steps, time) - 1];
    return step !== undefined && time <= step.stop ? step : null;
  }

  /**
   * Return the lanes to draw, those that came last first.
   * @param {(request: object) => boolean} wanted
   * @returns {import("./lane_chart.js").Lane[]}
   */
  lanes(wanted) {
    const rows = [];
    for (const request of this.requests.values()) {
      if (!wanted(request)) continue;
      const stop = request.finished ?? this.now;
      const phases = request.phases.map(([phase, start], at) => ({
        phase,
        start,
        stop: request.phases[at + 1]?.[1] ?? stop,
      }));
      rows.push({
        number: request.number,
        label: laneName(request),
        ended: request.finished !== null,
        start: request.arrival,
        stop,
        phases,
        chunks: this.chunks.get(request.number) ?? [],
        reason: request.own === false ? null : (request.finish_reason ?? (request.error ? "error" : null)),
      });
    }
    return rows.sort((a, b) => b.number - a.number);
  }

  /**
   * Put lanes that follow each other into one row. A lane stays in the row in which it was put first.
   * @param {import("./lane_chart.js").Lane[]} lanes
   * @returns {import("./lane_chart.js").LaneRow[]}
   */
  packed(lanes) {
    const rows = [];
    const ends = [];
    for (const lane of [...lanes].sort((a, b) => a.number - b.number)) {
      let row = this.places.get(lane.number) ?? ends.findIndex((end) => end <= lane.start);
      if (row < 0) row = ends.length;
      this.places.set(lane.number, row);
      while (rows.length <= row) {
        rows.push([]);
        ends.push(-Infinity);
      }
      rows[row].push(lane);
      ends[row] = Math.max(ends[row], lane.ended ? lane.stop : Infinity);
    }
    return rows;
  }

  /**
   * Return what plots show, in slices of time up to the present: rates are means, queues the longest,
   * other numbers the last that were known.
   * @param {number} seconds of each slice
   * @param {number} count of slices
   */
  slices(seconds, count) {
    const start = (Math.floor(this.now / seconds) + 1 - count) * seconds;
    const column = (value) => new Array(count).fill(value);
    const found = {
      x: column(0).map((_, at) => (at + 1 - count) * seconds),
      generated: column(0),
      prompt: column(0),
      running: column(0),
      waiting: column(0),
      used: column(null),
    };
    const low = lowerBound(this.steps, start);
    for (let index = low; index < this.steps.length; index += 1) {
      const step = this.steps[index];
      const at = Math.min(count - 1, Math.floor((step.start - start) / seconds));
      found.generated[at] += step.generated / seconds;
      found.prompt[at] += step.prefills / seconds;
      found.running[at] = Math.max(found.running[at], step.running);
      found.waiting[at] = Math.max(found.waiting[at], step.waiting);
      found.used[at] = 1 - step.free / Math.max(1, this.pagesTotal);
    }
    const before = this.steps[low - 1];
    carry(found.used, before === undefined ? null : 1 - before.free / Math.max(1, this.pagesTotal));
    const samples = this.samples.map((sample) => ({ at: sample.time - start, sample }));
    const uses = this.uses.map((sample) => ({ at: sample.time - this.epoch - start, sample }));
    return { ...found, samples: sliced(samples, seconds, count), uses: sliced(uses, seconds, count) };
  }
}

/** Put each value that is null in place of the last one before it. */
function carry(column, first) {
  let last = first;
  column.forEach((value, at) => {
    if (value === null) column[at] = last;
    else last = value;
  });
}

/** Return the last sample up to the end of each slice, null before the first. */
function sliced(samples, seconds, count) {
  const column = new Array(count).fill(null);
  let first = null;
  for (const { at, sample } of samples) {
    if (at < 0) first = sample;
    else column[Math.min(count - 1, Math.floor(at / seconds))] = sample;
  }
  carry(column, first);
  return column;
}

/** Return the index of the first step that begins at or after a time. */
function lowerBound(steps, time) {
  let [low, high] = [0, steps.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle].start < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * Return what a lane is called.
 * @param {any} request
 */
export function laneName(request) {
  const kind = { turn: "turn", run: "run", request: "request" }[request.kind] ?? request.kind;
  const sample = request.index ? `, sample ${request.index + 1}` : "";
  return `#${request.number} ${request.own === false ? "of another key" : kind}${sample}`;
}
