/**
 * The lanes of requests and the steps below them, on one time axis. Only what is on the screen is
 * drawn: the canvas is as large as its frame and stays in place while an empty element gives the
 * frame its scroll bar, so that thousands of lanes cost as much as twenty.
 */

import { css } from "./inks.js";
import { ticks } from "./scale_ticks.js";
import { steer, steerByKey } from "./time_window.js";

const LANE = 22;
const BAR = 14;
const RULER = 24;
const STEPS = 84;
const NARROW = 560;

/**
 * @typedef {object} LaneRow
 * @property {number} number
 * @property {string} label
 * @property {boolean} ended
 * @property {number} start
 * @property {number} stop the present for a request under way
 * @property {{phase: string, start: number, stop: number}[]} phases
 * @property {number[]} chunks times at which a piece of the prompt began
 * @property {string | null} reason why it ended
 * @typedef {object} StepBar
 * @property {number} start
 * @property {number} stop
 * @property {number} decodes tokens
 * @property {number} prefills tokens
 */

export class LaneChart {
  /**
   * @param {HTMLElement} host
   * @param {import("./time_window.js").TimeWindow} view
   * @param {object} calls
   * @param {(lane: LaneRow | null, how: "click" | "keys") => void} calls.onPick
   * @param {(lane: LaneRow | null, time: number) => string} calls.describe words for the pointer's place
   * @param {(time: number, relative: boolean, span: number) => string} calls.label of a mark of the axis,
   *   `relative` to the present or not
   */
  constructor(host, view, calls) {
    this.view = view;
    this.calls = calls;
    /** @type {LaneRow[]} */
    this.lanes = [];
    /** @type {StepBar[]} */
    this.steps = [];
    /** Number of the chosen lane, or -1. */
    this.chosen = -1;
    this.theme = null;
    this.pending = 0;
    this.milliseconds = 0;
    this.frame = document.createElement("div");
    this.frame.className = "lane-frame";
    this.canvas = document.createElement("canvas");
    this.canvas.className = "lane-canvas";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "time line");
    this.spacer = document.createElement("div");
    this.spacer.className = "lane-spacer";
    this.tip = document.createElement("div");
    this.tip.className = "lane-tip";
    this.tip.hidden = true;
    this.frame.append(this.canvas, this.spacer);
    host.append(this.frame, this.tip);
    this.frame.addEventListener("scroll", () => this.request());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.request());
    this.canvas.addEventListener("blur", () => this.request());
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    steer(this.canvas, view, {
      plot: () => ({ left: this.left, width: this.plotWidth }),
      scrolls: () => this.spacer.offsetHeight > 0,
      onClick: (event) => this.pick(this.laneAt(event.offsetY)),
    });
    this.observer = new ResizeObserver(() => this.request());
    this.observer.observe(this.frame);
  }

  /** Stop watching and drawing. */
  close() {
    this.observer.disconnect();
    cancelAnimationFrame(this.pending);
  }

  get left() {
    return this.frame.clientWidth < NARROW ? 0 : 148;
  }

  get plotWidth() {
    return Math.max(10, this.frame.clientWidth - this.left);
  }

  /**
   * @param {LaneRow[]} lanes the topmost first
   * @param {StepBar[]} steps ascending
   * @param {ReturnType<typeof import("./inks.js").readTheme>} theme
   */
  show(lanes, steps, theme) {
    this.lanes = lanes;
    this.steps = steps;
    if (theme !== this.theme) this.patterns = null;
    this.theme = theme;
    this.request();
  }

  /** Draw with the next frame. */
  request() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.draw();
    });
  }

  x(time) {
    return this.left + ((time - this.view.start) / this.view.span) * this.plotWidth;
  }

  draw() {
    const width = this.frame.clientWidth;
    const height = this.frame.clientHeight;
    if (this.theme === null || width === 0 || height === 0) return;
    const begin = performance.now();
    const ratio = globalThis.devicePixelRatio || 1;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      [this.canvas.width, this.canvas.height] = [wide, high];
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    this.laneHeight = Math.max(LANE, height - RULER - STEPS);
    const above = Math.max(0, this.lanes.length * LANE - (height - RULER - STEPS));
    this.spacer.style.height = `${above}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.patterns ??= this.makePatterns(context);
    this.drawRuler(context, width, height);
    this.drawLanes(context, width, height);
    this.drawSteps(context, width, height);
    this.drawPresent(context, height);
    this.milliseconds = performance.now() - begin;
  }

  drawRuler(context, width, height) {
    const { theme, view } = this;
    context.font = `11px ${theme.font}`;
    context.textBaseline = "middle";
    context.textAlign = "left";
    const origin = view.following ? view.now : 0;
    for (const mark of ticks(view.start - origin, view.stop - origin, this.plotWidth / 120)) {
      const x = Math.round(this.x(mark + origin)) + 0.5;
      if (x < this.left) continue;
      context.fillStyle = css(theme.line);
      context.fillRect(x, 0, 1, height);
      context.fillStyle = css(theme.muted);
      const label = this.calls.label(mark, view.following, view.span);
      if (x + 4 + context.measureText(label).width < width) context.fillText(label, x + 4, RULER / 2);
    }
    context.fillStyle = css(theme.line);
    context.fillRect(0, RULER - 1, width, 1);
  }

  drawLanes(context, width, height) {
    const { theme } = this;
    const room = height - RULER - STEPS;
    const scroll = this.frame.scrollTop;
    const first = Math.max(0, Math.floor(scroll / LANE));
    const last = Math.min(this.lanes.length - 1, Math.floor((scroll + room) / LANE));
    context.save();
    context.beginPath();
    context.rect(0, RULER, width, room);
    context.clip();
    const focused = document.activeElement === this.canvas;
    for (let index = first; index <= last; index += 1) {
      const lane = this.lanes[index];
      const top = RULER + index * LANE - scroll;
      if (lane.number === this.chosen) {
        context.fillStyle = css(theme.accent, focused ? 0.22 : 0.14);
        context.fillRect(0, top, width, LANE);
      }
      context.save();
      context.beginPath();
      context.rect(this.left, top, width - this.left, LANE);
      context.clip();
      this.drawLane(context, lane, top + (LANE - BAR) / 2);
      context.restore();
      if (this.left > 0) {
        context.fillStyle = css(lane.ended ? theme.muted : theme.text);
        context.font = `${lane.ended ? 400 : 600} 12px ${theme.font}`;
        context.textAlign = "left";
        context.textBaseline = "middle";
        context.fillText(fitted(context, lane.label, this.left - 18), 10, top + LANE / 2 + 0.5);
      }
    }
    context.restore();
  }

  /** Draw one lane: its phases, where pieces of its prompt began, and how it ended. */
  drawLane(context, lane, top) {
    const { view, theme } = this;
    if (lane.stop < view.start || lane.start > view.stop) return;
    for (const { phase, start, stop } of lane.phases) {
      if (stop < view.start || start > view.stop) continue;
      const from = Math.max(this.left - 4, this.x(start));
      const to = Math.min(this.left + this.plotWidth + 4, Math.max(this.x(stop), from + 1.5));
      const ink = theme.phases[phase] ?? theme.other;
      const pattern = this.patterns[phase];
      const [inset, high] = phase === "waiting" ? [BAR / 2 - 3, 6] : [0, BAR];
      context.fillStyle = css(ink, pattern ? 0.3 : 0.95);
      context.fillRect(from, top + inset, to - from, high);
      if (pattern) {
        context.fillStyle = pattern;
        context.fillRect(from, top + inset, to - from, high);
      }
    }
    context.fillStyle = css(theme.ground);
    let before = -10;
    for (const time of lane.chunks) {
      const x = Math.round(this.x(time));
      if (x - before < 3 || x < this.left || x > this.left + this.plotWidth) continue;
      context.fillRect(x, top, 1, BAR);
      before = x;
    }
    if (lane.ended) this.drawEnd(context, this.x(lane.stop), top + BAR / 2, lane.reason);
  }

  /** Mark an end: a disc for a text that stopped, a bar for a length, a cross for what was broken off. */
  drawEnd(context, x, y, reason) {
    const { theme } = this;
    context.strokeStyle = css(theme.ground);
    context.lineWidth = 1.5;
    if (reason === "length") {
      context.fillStyle = css(theme.text);
      context.fillRect(x - 1, y - BAR / 2 - 1, 3, BAR + 2);
    } else if (reason === "stop" || reason === "tool_calls") {
      context.fillStyle = css(theme.text);
      context.beginPath();
      context.arc(x, y, 4, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
    } else if (reason !== null) {
      context.strokeStyle = css(theme.eviction);
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(x - 4, y - 4);
      context.lineTo(x + 4, y + 4);
      context.moveTo(x + 4, y - 4);
      context.lineTo(x - 4, y + 4);
      context.stroke();
    }
  }

  /** Draw steps as bars of their tokens; what falls onto one pixel is drawn as its highest. */
  drawSteps(context, width, height) {
    const { theme, view } = this;
    const bottom = height - 4;
    const room = STEPS - 24;
    context.fillStyle = css(theme.line);
    context.fillRect(0, height - STEPS, width, 1);
    let low = 0;
    let high = this.steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle].stop < view.start) low = middle + 1;
      else high = middle;
    }
    const bars = new Map();
    let most = 1;
    for (let index = low; index < this.steps.length && this.steps[index].start <= view.stop; index += 1) {
      const step = this.steps[index];
      const x = Math.max(this.left, Math.floor(this.x(step.start)));
      const wide = Math.max(1, this.x(step.stop) - x);
      const tokens = step.decodes + step.prefills;
      most = Math.max(most, tokens);
      const old = bars.get(x);
      if (old === undefined || old.tokens < tokens) bars.set(x, { x, wide, tokens, decodes: step.decodes });
    }
    const scale = room / most;
    for (const { x, wide, tokens, decodes } of bars.values()) {
      const gap = wide >= 4 ? 1 : 0;
      const [all, part] = [Math.max(2, tokens * scale), decodes > 0 ? Math.max(2, decodes * scale) : 0];
      if (tokens > decodes) {
        context.fillStyle = css(theme.phases.prefill);
        context.fillRect(x, bottom - all, wide - gap, all - part);
      }
      context.fillStyle = css(theme.phases.decode);
      context.fillRect(x, bottom - part, wide - gap, part);
    }
    context.font = `11px ${theme.font}`;
    context.textBaseline = "top";
    context.textAlign = "left";
    const label = `Tokens a step, at most ${most.toLocaleString("en")}`;
    const lines = this.left > 0 ? ["Tokens a step", `at most ${most.toLocaleString("en")}`] : [label];
    context.fillStyle = css(theme.muted);
    lines.forEach((line, index) => context.fillText(line, this.left > 0 ? 10 : 4, height - STEPS + 6 + 15 * index));
  }

  /** Draw the line of the present. */
  drawPresent(context, height) {
    const x = this.x(this.view.now);
    if (x < this.left || x > this.left + this.plotWidth) return;
    context.fillStyle = css(this.theme.accent);
    context.fillRect(Math.round(x), 0, 1, height);
  }

  /** Make the patterns of phases, which tell them apart without colour. */
  makePatterns(context) {
    const make = (ink, lines) => {
      const tile = new OffscreenCanvas(8, 8);
      const pen = tile.getContext("2d");
      pen.strokeStyle = css(ink);
      pen.lineWidth = 2;
      pen.beginPath();
      for (const [x1, y1, x2, y2] of lines) {
        pen.moveTo(x1, y1);
        pen.lineTo(x2, y2);
      }
      pen.stroke();
      return context.createPattern(tile, "repeat");
    };
    const rising = [[-2, 10, 10, -2], [-6, 6, 6, -6], [2, 14, 14, 2]];
    const falling = [[-2, -2, 10, 10], [6, -2, 14, 6], [-6, 2, 6, 14]];
    const { phases } = this.theme;
    return {
      waiting: make(phases.waiting, [[2, -1, 2, 9], [6, -1, 6, 9]]),
      loading: make(phases.loading, rising),
      preempted: make(phases.preempted, [...rising, ...falling]),
    };
  }

  /** Return the index of the lane at a height of the canvas, or -1. */
  laneAt(y) {
    if (y < RULER || y > this.frame.clientHeight - STEPS) return -1;
    const index = Math.floor((y - RULER + this.frame.scrollTop) / LANE);
    return index < this.lanes.length ? index : -1;
  }

  point(event) {
    const index = this.laneAt(event.offsetY);
    const time = this.view.start + ((event.offsetX - this.left) / this.plotWidth) * this.view.span;
    const words = event.offsetX < this.left && index < 0 ? "" : this.calls.describe(this.lanes[index] ?? null, time);
    this.tip.hidden = words === "";
    this.tip.textContent = words;
    const right = event.offsetX > this.frame.clientWidth / 2;
    const x = right ? event.offsetX - this.tip.offsetWidth - 14 : event.offsetX + 14;
    const y = Math.min(event.offsetY + 14, this.frame.clientHeight - this.tip.offsetHeight - 4);
    this.tip.style.transform = `translate(${Math.max(0, x)}px, ${y}px)`;
    this.canvas.style.cursor = index >= 0 ? "pointer" : "grab";
  }

  leave() {
    this.tip.hidden = true;
  }

  pick(index, how = "click") {
    const lane = this.lanes[index] ?? null;
    this.chosen = lane?.number ?? -1;
    this.request();
    this.calls.onPick(lane, how);
  }

  key(event) {
    const step = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (step === undefined) {
      if (event.key === "Escape") this.pick(-1, "keys");
      else if (event.key === "Enter" && this.chosen >= 0) this.fitChosen();
      else steerByKey(event, this.view);
      return;
    }
    event.preventDefault();
    if (this.lanes.length === 0) return;
    const now = this.lanes.findIndex((lane) => lane.number === this.chosen);
    const index = now < 0 ? 0 : Math.min(this.lanes.length - 1, Math.max(0, now + step));
    const room = this.frame.clientHeight - RULER - STEPS;
    if (index * LANE < this.frame.scrollTop) this.frame.scrollTop = index * LANE;
    else if ((index + 1) * LANE > this.frame.scrollTop + room) this.frame.scrollTop = (index + 1) * LANE - room;
    this.pick(index, "keys");
  }

  /** Zoom to the chosen lane. */
  fitChosen() {
    const lane = this.lanes.find((one) => one.number === this.chosen);
    if (lane) this.view.fit(lane.start, lane.stop);
  }
}

/** Shorten a text to a width. */
function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}
