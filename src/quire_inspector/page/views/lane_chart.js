/**
 * The lanes of requests and the steps below them, on one time axis. Only what is on the screen is
 * drawn: the canvas is as large as its frame and stays in place while an empty element gives the
 * frame its scroll bar, so that thousands of lanes cost as much as twenty.
 */

import { css } from "./inks.js";
import { BAR, fitted, paintLane, paintSteps, phasePatterns } from "./lane_paint.js";
import { ticks } from "./scale_ticks.js";
import { steer, steerByKey } from "./time_window.js";

const LANE = 22;
const RULER = 24;
const STEPS = 84;
const NARROW = 560;

/**
 * @typedef {Lane[]} LaneRow one lane, or several that follow each other
 * @typedef {object} Lane
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
   * @param {(lane: Lane | null, how: "click" | "keys") => void} calls.onPick
   * @param {(lane: Lane | null, time: number) => string} calls.describe words for the pointer's place
   * @param {(time: number, relative: boolean, span: number) => string} calls.label of a mark of the axis,
   *   `relative` to the present or not
   */
  constructor(host, view, calls) {
    this.view = view;
    this.calls = calls;
    /** @type {LaneRow[]} */
    this.rows = [];
    /** Whether a row may have several lanes. */
    this.packed = false;
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
      onClick: (event) => this.pick(this.laneAt(event.offsetX, event.offsetY)),
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
    return this.packed || this.frame.clientWidth < NARROW ? 0 : 148;
  }

  get plotWidth() {
    return Math.max(10, this.frame.clientWidth - this.left);
  }

  /**
   * @param {LaneRow[]} rows the topmost first
   * @param {boolean} packed whether a row may have several lanes
   * @param {StepBar[]} steps ascending
   * @param {ReturnType<typeof import("./inks.js").readTheme>} theme
   */
  show(rows, packed, steps, theme) {
    this.rows = rows;
    this.packed = packed;
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
    const above = Math.max(0, this.rows.length * LANE - (height - RULER - STEPS));
    this.spacer.style.height = `${above}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.patterns ??= phasePatterns(context, this.theme.phases);
    const { theme, patterns, view } = this;
    this.plot = { left: this.left, width: this.plotWidth, start: view.start, stop: view.stop, theme, patterns };
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
    const last = Math.min(this.rows.length - 1, Math.floor((scroll + room) / LANE));
    context.save();
    context.beginPath();
    context.rect(0, RULER, width, room);
    context.clip();
    context.textAlign = "left";
    context.textBaseline = "middle";
    const { start, stop } = this.view;
    if (!this.rows.some((row) => row.some((lane) => lane.stop >= start && lane.start <= stop))) {
      context.fillStyle = css(theme.muted);
      context.font = `12px ${theme.font}`;
      context.fillText("No request in this time. Key 0 shows all that is known.", this.left + 12, RULER + 22);
    }
    const focused = document.activeElement === this.canvas;
    for (let index = first; index <= last; index += 1) {
      const row = this.rows[index];
      const top = RULER + index * LANE - scroll;
      const chosen = row.find((lane) => lane.number === this.chosen);
      if (chosen) this.highlight(context, chosen, top, width, focused);
      context.save();
      context.beginPath();
      context.rect(this.left, top, width - this.left, LANE);
      context.clip();
      for (const lane of row) {
        paintLane(context, this.plot, lane, top + (LANE - BAR) / 2);
      }
      context.restore();
      if (this.left === 0) continue;
      const [lane] = row;
      context.fillStyle = css(lane.ended ? theme.muted : theme.text);
      context.font = `${lane.ended ? 400 : 600} 12px ${theme.font}`;
      context.fillText(fitted(context, lane.label, this.left - 18), 10, top + LANE / 2 + 0.5);
    }
    context.restore();
  }

  /** Set the chosen lane apart: its row, or its part of a row. */
  highlight(context, lane, top, width, focused) {
    context.fillStyle = css(this.theme.accent, focused ? 0.3 : 0.2);
    const from = this.packed ? this.x(lane.start) - 4 : 0;
    const to = this.packed ? Math.max(this.x(lane.stop), this.x(lane.start) + 2) + 7 : width;
    context.fillRect(from, top, to - from, LANE);
    if (!this.packed) return;
    context.strokeStyle = css(this.theme.accent);
    context.lineWidth = 1.5;
    context.strokeRect(from + 0.75, top + 0.75, to - from - 1.5, LANE - 1.5);
  }

  /** Draw the steps, and say what their height means. */
  drawSteps(context, width, height) {
    const { theme } = this;
    context.fillStyle = css(theme.line);
    context.fillRect(0, height - STEPS, width, 1);
    const most = paintSteps(context, this.plot, this.steps, height - 4, STEPS - 26);
    const words = `at most ${most.toLocaleString("en")}`;
    const lines = this.left > 0 ? ["Tokens a step", words] : [`Tokens a step, ${words}`];
    context.font = `11px ${theme.font}`;
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillStyle = css(theme.muted);
    lines.forEach((line, index) => context.fillText(line, 10, height - STEPS + 6 + 15 * index));
  }

  /** Draw the line of the present. */
  drawPresent(context, height) {
    const x = this.x(this.view.now);
    if (x < this.left || x > this.left + this.plotWidth) return;
    context.fillStyle = css(this.theme.accent);
    context.fillRect(Math.round(x), 0, 1, height);
  }

  /** Return the lane at a place of the canvas, or null. */
  laneAt(x, y) {
    if (y < RULER || y > this.frame.clientHeight - STEPS) return null;
    const row = this.rows[Math.floor((y - RULER + this.frame.scrollTop) / LANE)];
    if (row === undefined || !this.packed) return row?.[0] ?? null;
    let best = null;
    let nearest = 6;
    for (const lane of row) {
      const far = Math.max(this.x(lane.start) - x, x - this.x(lane.stop), 0);
      if (far < nearest) [best, nearest] = [lane, far];
    }
    return best;
  }

  point(event) {
    const lane = this.laneAt(event.offsetX, event.offsetY);
    const time = this.view.start + ((event.offsetX - this.left) / this.plotWidth) * this.view.span;
    const below = event.offsetY > this.frame.clientHeight - STEPS;
    const words = lane === null && !below ? "" : this.calls.describe(lane, time);
    this.tip.hidden = words === "";
    this.tip.textContent = words;
    const right = event.offsetX > this.frame.clientWidth / 2;
    const x = right ? event.offsetX - this.tip.offsetWidth - 14 : event.offsetX + 14;
    const y = Math.min(event.offsetY + 14, this.frame.clientHeight - this.tip.offsetHeight - 4);
    this.tip.style.transform = `translate(${Math.max(0, x)}px, ${y}px)`;
    this.canvas.style.cursor = lane === null ? "grab" : "pointer";
  }

  leave() {
    this.tip.hidden = true;
  }

  /**
   * Choose a lane.
   * @param {Lane | null} lane
   * @param {"click" | "keys"} [how]
   */
  pick(lane, how = "click") {
    this.chosen = lane?.number ?? -1;
    this.request();
    this.calls.onPick(lane, how);
  }

  key(event) {
    const step = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (step === undefined) {
      if (event.key === "Escape") this.pick(null, "keys");
      else if (event.key === "Enter" && this.chosen >= 0) this.fitChosen();
      else steerByKey(event, this.view);
      return;
    }
    event.preventDefault();
    const order = this.rows.flat().sort((a, b) => b.number - a.number);
    if (order.length === 0) return;
    const now = order.findIndex((lane) => lane.number === this.chosen);
    const lane = order[now < 0 ? 0 : Math.min(order.length - 1, Math.max(0, now + step))];
    this.reveal(lane);
    this.pick(lane, "keys");
  }

  /** Scroll a lane's row into view, and its time if it is out of sight. */
  reveal(lane) {
    const index = this.rows.findIndex((row) => row.includes(lane));
    const room = this.frame.clientHeight - RULER - STEPS;
    if (index * LANE < this.frame.scrollTop) this.frame.scrollTop = index * LANE;
    else if ((index + 1) * LANE > this.frame.scrollTop + room) this.frame.scrollTop = (index + 1) * LANE - room;
    const { start, stop, span } = this.view;
    if (lane.stop < start) this.view.pan(lane.start - start - 0.1 * span);
    else if (lane.start > stop) this.view.pan(lane.stop - stop + 0.1 * span);
  }

  /** Zoom to the chosen lane. */
  fitChosen() {
    const lane = this.rows.flat().find((one) => one.number === this.chosen);
    if (lane) this.view.fit(lane.start, lane.stop);
  }
}
