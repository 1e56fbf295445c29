/**
 * A small plot of lines over time or positions, drawn by uPlot in the theme's colours, with a caption
 * that says the last values in words.
 */

import { color } from "../lib/color.js";
import { el, fill } from "../lib/dom.js";

/** Dashes that tell lines apart without colour. */
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [4, 4], [1, 2], [10, 4], [3, 6]];

/**
 * @typedef {object} PlotLine
 * @property {string} label
 * @property {string} [colour] CSS; the series' own colour without it
 * @property {boolean} [filled] fill what lies below
 * @property {boolean} [points] draw points only
 */

export class LinePlot {
  /**
   * @param {HTMLElement} host
   * @param {object} options
   * @param {string} options.title
   * @param {PlotLine[]} options.lines
   * @param {(value: number) => string} options.write writes a value of the upright axis
   * @param {(value: number) => string} [options.writeX] writes a value of the level axis
   * @param {[number | null, number | null]} [options.range] of the upright axis
   * @param {boolean} [options.bars] draw the first line as bars
   * @param {number} [options.height] CSS pixels
   * @param {(x: number) => void} [options.onPick] called with the value of the level axis at a click
   */
  constructor(host, options) {
    this.options = options;
    this.lines = options.lines;
    /** @type {(number | null)[][]} */
    this.data = [[], ...options.lines.map(() => [])];
    this.plot = null;
    this.box = el("div.plot-box");
    this.legend = el("p.plot-legend");
    this.element = el("figure.plot", {}, el("figcaption.plot-title", {}, options.title), this.legend, this.box);
    host.append(this.element);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.box);
  }

  /** Free what the plot holds. */
  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.element.remove();
  }

  /**
   * Show values.
   * @param {ArrayLike<number>} xs ascending
   * @param {ArrayLike<number | null>[]} columns one for each line
   * @param {PlotLine[]} [lines] other lines than before
   */
  show(xs, columns, lines = this.lines) {
    const changed = lines.length !== this.lines.length || lines.some((line, at) => line.label !== this.lines[at].label);
    this.data = [xs, ...columns];
    this.lines = lines;
    if (changed || this.plot === null) this.make();
    else this.plot.setData(this.data);
    this.tell();
  }

  /** Draw again, after the theme has changed. */
  repaint() {
    if (this.plot !== null) this.make();
    this.tell();
  }

  /** @param {PlotLine} line @param {number} index */
  colourOf(line, index) {
    return line.colour ?? color.series(index);
  }

  tell() {
    const parts = this.lines.map((line, index) => {
      const column = this.data[index + 1];
      let last = null;
      for (let at = column.length - 1; at >= 0 && last === null; at -= 1) last = column[at];
      const key = el("span.plot-key", { "aria-hidden": "true", style: { background: this.colourOf(line, index) } });
      const value = last === null ? "–" : this.options.write(last);
      return el("span.plot-part", {}, key, `${line.label} `, el("b", {}, value));
    });
    fill(this.legend, parts);
  }

  make() {
    this.plot?.destroy();
    this.plot = null;
    const width = this.box.clientWidth;
    if (width === 0) return;
    const { write, writeX, range, bars, height = 132, onPick } = this.options;
    const ink = color.get("--muted");
    const grid = { stroke: color.get("--border"), width: 1 };
    const font = `11px ${getComputedStyle(this.box).fontFamily}`;
    const axis = { stroke: ink, grid, ticks: { show: false }, font, labelFont: font };
    const axes = [
      { ...axis, size: 22, gap: 3, space: 80, values: (_, marks) => marks.map(writeX ?? String) },
      { ...axis, size: 54, gap: 4, space: 28, values: (_, marks) => marks.map((mark) => (mark === null ? "" : write(mark))) },
    ];
    const series = this.lines.map((line, index) => {
      const stroke = this.colourOf(line, index);
      const one = { label: line.label, stroke, width: 1.5, dash: DASHES[index % DASHES.length], points: { show: false } };
      if (line.filled) one.fill = stroke.replace(/^rgb\((.*)\)$/, "rgba($1, 0.16)");
      if (line.points) Object.assign(one, { width: 0, points: { show: true, size: 5, fill: stroke, stroke } });
      if (bars && index === 0) one.paths = globalThis.uPlot.paths.bars({ size: [0.9, 24] });
      return one;
    });
    const scale = range === undefined ? {} : { range: (_, low, high) => [range[0] ?? low, range[1] ?? (high > 0 ? high * 1.08 : 1)] };
    this.plot = new globalThis.uPlot(
      {
        width,
        height,
        axes,
        series: [{}, ...series],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: { x: { time: false }, y: scale },
        hooks: { setCursor: [(plot) => this.hover(plot)] },
      },
      this.data,
      this.box,
    );
    this.plot.root.setAttribute("role", "img");
    this.plot.root.setAttribute("aria-label", `${this.options.title}, a plot`);
    if (onPick) {
      this.plot.over.addEventListener("click", () => {
        const index = this.plot.cursor.idx;
        if (index !== null && index !== undefined) onPick(this.data[0][index]);
      });
    }
  }

  /** Say the values under the pointer in the legend; the last ones when it has left. */
  hover(plot) {
    const index = plot.cursor.idx;
    this.legend.querySelectorAll("b").forEach((value, at) => {
      if (index === null || index === undefined) return;
      const found = this.data[at + 1][index];
      value.textContent = found === null || found === undefined ? "–" : this.options.write(found);
    });
    if (index === null || index === undefined) this.tell();
  }

  resize() {
    const width = this.box.clientWidth;
    if (width === 0 || this.data[0].length === 0) return;
    if (this.plot === null) this.make();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: this.options.height ?? 132 });
  }
}
