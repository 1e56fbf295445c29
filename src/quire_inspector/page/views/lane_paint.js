/**
 * How a lane and the steps look: colours with patterns, so that phases are told apart without colour.
 *
 * @typedef {object} Plot
 * @property {number} left of the plot, in CSS pixels
 * @property {number} width of the plot
 * @property {number} start time at its left edge
 * @property {number} stop time at its right edge
 * @property {ReturnType<typeof import("./inks.js").readTheme>} theme
 * @property {Record<string, CanvasPattern>} patterns
 */

import { css } from "./inks.js";

/** Height of a lane's bar. */
export const BAR = 14;

/** Return where a time lies. */
export function xOf(plot, time) {
  return plot.left + ((time - plot.start) / (plot.stop - plot.start)) * plot.width;
}

/**
 * Draw one lane: its phases, where pieces of its prompt began, and how it ended.
 * @param {CanvasRenderingContext2D} context
 * @param {Plot} plot
 * @param {import("./lane_chart.js").Lane} lane
 * @param {number} top
 */
export function paintLane(context, plot, lane, top) {
  const { theme, left, width, start: first, stop: last } = plot;
  if (lane.stop < first || lane.start > last) return;
  for (const { phase, start, stop } of lane.phases) {
    if (stop < first || start > last) continue;
    const from = Math.max(left - 4, xOf(plot, start));
    const to = Math.min(left + width + 4, Math.max(xOf(plot, stop), from + 1.5));
    const ink = theme.phases[phase] ?? theme.other;
    const pattern = plot.patterns[phase];
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
    const x = Math.round(xOf(plot, time));
    if (x - before < 3 || x < left || x > left + width) continue;
    context.fillRect(x, top, 1, BAR);
    before = x;
  }
  if (lane.ended) paintEnd(context, theme, xOf(plot, lane.stop), top + BAR / 2, lane.reason);
}

/** Mark an end: a disc for a text that stopped, a bar for a length, a cross for what was broken off. */
function paintEnd(context, theme, x, y, reason) {
  context.strokeStyle = css(theme.ground);
  context.lineWidth = 1.5;
  context.fillStyle = css(theme.text);
  if (reason === "length") {
    context.fillRect(x - 1, y - BAR / 2 - 1, 3, BAR + 2);
  } else if (reason === "stop" || reason === "tool_calls") {
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

/**
 * Draw steps as bars of their tokens; what falls onto one pixel is drawn as its highest. Returns the
 * most tokens of a step that is shown.
 * @param {CanvasRenderingContext2D} context
 * @param {Plot} plot
 * @param {import("./lane_chart.js").StepBar[]} steps ascending
 * @param {number} bottom
 * @param {number} room height of the highest bar
 */
export function paintSteps(context, plot, steps, bottom, room) {
  const { theme } = plot;
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle].stop < plot.start) low = middle + 1;
    else high = middle;
  }
  const bars = new Map();
  let most = 1;
  for (let index = low; index < steps.length && steps[index].start <= plot.stop; index += 1) {
    const step = steps[index];
    const x = Math.max(plot.left, Math.floor(xOf(plot, step.start)));
    const wide = Math.max(1, xOf(plot, step.stop) - x);
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
  return most;
}

/**
 * Make the patterns of phases.
 * @param {CanvasRenderingContext2D} context
 * @param {Record<string, import("./inks.js").Ink>} inks
 */
export function phasePatterns(context, inks) {
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
  return {
    waiting: make(inks.waiting, [[2, -1, 2, 9], [6, -1, 6, 9]]),
    loading: make(inks.loading, rising),
    preempted: make(inks.preempted, [...rising, ...falling]),
  };
}

/** Shorten a text to a width. */
export function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}
