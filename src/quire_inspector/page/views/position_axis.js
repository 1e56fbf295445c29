/**
 * A branch's axis of positions: one row for each layer class (what it holds, holes of its window,
 * null pages), one for recurrent layers' checkpoints, and one for the positions that a rewind
 * reaches. All rows share one scale, and a cursor on it says where a rewind would land.
 *
 * @typedef {object} Span
 * @property {number} start first position
 * @property {number} stop position after the last
 * @property {"held" | "hole" | "null" | "reachable" | "rerun"} kind
 * @typedef {object} AxisRow
 * @property {string} label
 * @property {Span[]} spans
 * @property {{position: number, title: string}[]} [marks] checkpoints
 * @typedef {object} AxisPicture
 * @property {number} tokens length of the axis
 * @property {AxisRow[]} rows
 */

import { ticks } from "./scale_ticks.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const ROW = 26;
const BAR = 14;
const TOP = 8;
const SCALE = 26;
const TITLES = {
  held: "held",
  hole: "hole of the window",
  null: "null page",
  reachable: "reachable",
  rerun: "reachable by running tokens again",
};

const PATTERNS = new Set(["hole", "null", "rerun"]);

let axes = 0;

/** Make an SVG element. */
function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/**
 * Return where a rewind to a position lands: the last position up to it that is reachable and, where
 * layers are recurrent, at which a state is kept. -1: there is none.
 * @param {[number, number][]} ranges reachable ones, half-open, ascending
 * @param {number[] | null} kept positions of kept states, ascending; null: no layer needs one
 * @param {number} position
 */
export function landing(ranges, kept, position) {
  let best = -1;
  for (const [start, stop] of ranges) {
    if (start > position) continue;
    if (kept === null) best = Math.max(best, Math.min(position, stop - 1));
    else for (const one of kept) if (one <= position && start <= one && one < stop) best = Math.max(best, one);
  }
  return best;
}

export class PositionAxis {
  /**
   * @param {HTMLElement} host
   * @param {(position: number) => string} read says a position in words; called while the cursor moves
   */
  constructor(host, read) {
    this.host = host;
    this.read = read;
    axes += 1;
    this.prefix = `axis-${axes}`;
    /** @type {AxisPicture | null} */
    this.picture = null;
    this.position = 0;
    this.box = document.createElement("div");
    this.box.className = "position-axis";
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "slider");
    this.box.setAttribute("aria-label", "Position in the branch");
    this.box.setAttribute("aria-valuemin", "0");
    this.note = document.createElement("p");
    this.note.className = "axis-note";
    host.append(this.box, this.note);
    this.box.addEventListener("pointermove", (event) => this.point(event));
    this.box.addEventListener("pointerdown", (event) => this.point(event));
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.observer = new ResizeObserver(() => {
      if (this.box.clientWidth !== this.width) this.draw();
    });
    this.observer.observe(host);
  }

  /** Stop watching the size. */
  close() {
    this.observer.disconnect();
  }

  /** @param {AxisPicture} picture */
  show(picture) {
    const first = this.picture === null || this.position > picture.tokens;
    this.picture = picture;
    this.box.setAttribute("aria-valuemax", String(picture.tokens));
    if (first) this.position = picture.tokens;
    this.draw();
    this.tell();
  }

  /** Draw all rows at the box's width. */
  draw() {
    if (this.picture === null) return;
    const { tokens, rows } = this.picture;
    this.width = this.box.clientWidth;
    if (this.width === 0) return;
    this.left = this.width < 520 ? 8 : 132;
    const labelsAbove = this.width < 520;
    const rowHeight = labelsAbove ? ROW + 14 : ROW;
    const height = TOP + rows.length * rowHeight + SCALE;
    this.scale = (this.width - this.left - 14) / Math.max(1, tokens);
    const x = (position) => this.left + position * this.scale;
    const drawing = svg("svg", { width: this.width, height, "aria-hidden": "true" });
    drawing.append(this.patterns());
    const bottom = TOP + rows.length * rowHeight;
    for (const tick of ticks(0, tokens, Math.max(2, this.width / 110))) {
      drawing.append(svg("line", { class: "axis-grid", x1: x(tick), x2: x(tick), y1: TOP, y2: bottom + 4 }));
      const label = svg("text", { class: "axis-tick", x: x(tick), y: bottom + 18, "text-anchor": "middle" });
      label.textContent = tick.toLocaleString("en");
      drawing.append(label);
    }
    rows.forEach((row, index) => {
      const top = TOP + index * rowHeight + (labelsAbove ? 14 : (ROW - BAR) / 2);
      const label = svg("text", {
        class: "axis-label",
        x: labelsAbove ? this.left : this.left - 10,
        y: labelsAbove ? top - 3 : top + BAR - 3,
        "text-anchor": labelsAbove ? "start" : "end",
      });
      label.textContent = row.label;
      drawing.append(label);
      drawing.append(svg("rect", { class: "axis-track", x: x(0), y: top, width: tokens * this.scale, height: BAR }));
      for (const span of this.visible(row.spans)) {
        const bar = svg("rect", {
          class: `axis-span axis-${span.kind}`,
          x: x(span.start),
          y: top,
          width: Math.max(1, (span.stop - span.start) * this.scale),
          height: BAR,
        });
        if (PATTERNS.has(span.kind)) bar.setAttribute("fill", `url(#${this.prefix}-${span.kind})`);
        const title = svg("title");
        title.textContent = `${row.label}: ${span.start} to ${span.stop} ${TITLES[span.kind]}`;
        bar.append(title);
        drawing.append(bar);
      }
      for (const mark of row.marks ?? []) {
        const [cx, cy, r] = [x(mark.position), top + BAR / 2, 5.5];
        const points = `${cx},${cy - r} ${cx + r},${cy} ${cx},${cy + r} ${cx - r},${cy}`;
        const diamond = svg("polygon", { class: "axis-mark", points });
        const title = svg("title");
        title.textContent = mark.title;
        diamond.append(title);
        drawing.append(diamond);
      }
    });
    this.line = svg("line", { class: "axis-cursor", y1: TOP - 4, y2: bottom + 4 });
    drawing.append(this.line);
    this.box.replaceChildren(drawing);
    this.place();
  }

  /** Make the fills of holes and null pages. */
  patterns() {
    const hole = svg(
      "pattern",
      { id: `${this.prefix}-hole`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("line", { class: "axis-hatch", x1: 0, x2: 0, y1: 0, y2: 6 }),
    );
    const nothing = svg(
      "pattern",
      { id: `${this.prefix}-null`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      svg("circle", { class: "axis-dot", cx: 3, cy: 3, r: 1 }),
    );
    const rerun = svg(
      "pattern",
      { id: `${this.prefix}-rerun`, width: 5, height: 5, patternUnits: "userSpaceOnUse" },
      svg("line", { class: "axis-rerun-line", x1: 1.5, x2: 1.5, y1: 0, y2: 5 }),
    );
    return svg("defs", {}, hole, nothing, rerun);
  }

  /** Join spans of one kind that are less than a pixel apart, so that long lists stay cheap. */
  visible(spans) {
    const out = [];
    for (const span of spans) {
      const last = out.at(-1);
      if (last && last.kind === span.kind && (span.start - last.stop) * this.scale < 0.75) {
        last.stop = Math.max(last.stop, span.stop);
      } else out.push({ ...span });
    }
    return out;
  }

  point(event) {
    if (this.picture === null || event.target === this.note) return;
    const left = this.box.getBoundingClientRect().left;
    this.go(Math.round((event.clientX - left - this.left) / this.scale));
  }

  key(event) {
    const large = Math.max(1, Math.round((this.picture?.tokens ?? 0) / 20));
    const steps = {
      ArrowLeft: this.position - 1,
      ArrowRight: this.position + 1,
      ArrowDown: this.position - 1,
      ArrowUp: this.position + 1,
      PageDown: this.position - large,
      PageUp: this.position + large,
      Home: 0,
      End: this.picture?.tokens ?? 0,
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.go(steps[event.key]);
  }

  /** Move the cursor to a position, clipped to the axis. */
  go(position) {
    if (this.picture === null) return;
    this.position = Math.min(this.picture.tokens, Math.max(0, position));
    this.place();
    this.tell();
  }

  place() {
    const x = String(this.left + this.position * this.scale);
    this.line.setAttribute("x1", x);
    this.line.setAttribute("x2", x);
  }

  tell() {
    const words = this.read(this.position);
    this.note.textContent = words;
    this.box.setAttribute("aria-valuenow", String(this.position));
    this.box.setAttribute("aria-valuetext", words);
  }
}
