/**
 * The grid of one pool's pages: two canvases on each other. The lower one has the pages and is
 * painted when the pool or the colours change; the upper one has what moves: the cursor, the pages of
 * the chosen branch, and those that go next.
 */

import { css } from "./inks.js";
import { gridOf, paintTiles } from "./page_tiles.js";

/** So many of the next evictions get a frame of their own strength; the ones after them the last. */
const STRONG_EVICTIONS = 6;
/** So many pages at most are painted in the screen's full resolution. */
const FINE = 2000;

/**
 * @typedef {object} GridPicture
 * @property {number} count pages of the pool
 * @property {Uint32Array} kinds each page's index into `tiles`
 * @property {import("./page_tiles.js").Tile[]} tiles
 * @property {Map<number, number>} evictions page to its place among the shown evictions, from 0
 * @property {number[]} chosen pages of the chosen branch, in the order of their positions
 */

export class PageGrid {
  /**
   * @param {HTMLElement} host the element that the grid fills
   * @param {object} calls
   * @param {(page: number, how: "pointer" | "keys") => void} calls.onMove the cursor stands on a page
   * @param {() => void} calls.onLeave the pointer left
   * @param {(page: number) => void} calls.onPick a page was clicked or chosen with Enter
   */
  constructor(host, calls) {
    this.host = host;
    this.calls = calls;
    /** @type {GridPicture} */
    this.picture = { count: 0, kinds: new Uint32Array(), tiles: [], evictions: new Map(), chosen: [] };
    this.grid = { size: 12, columns: 1, rows: 0 };
    this.cursor = -1;
    this.hovered = -1;
    this.pinned = -1;
    this.theme = null;
    /** Milliseconds that the last paintings took: of all pages, and of what moves. */
    this.times = { pages: 0, marks: 0 };

    this.stack = document.createElement("div");
    this.stack.className = "page-grid-stack";
    this.pages = document.createElement("canvas");
    this.pages.setAttribute("aria-hidden", "true");
    this.marks = document.createElement("canvas");
    this.marks.tabIndex = 0;
    this.marks.setAttribute("role", "application");
    this.marks.setAttribute("aria-roledescription", "grid of pages");
    this.stack.append(this.pages, this.marks);
    host.append(this.stack);

    this.marks.addEventListener("pointermove", (event) => this.hover(event));
    this.marks.addEventListener("pointerleave", () => this.leave());
    this.marks.addEventListener("click", (event) => this.pick(this.pageAt(event)));
    this.marks.addEventListener("keydown", (event) => this.key(event));
    this.marks.addEventListener("focus", () => this.focus());
    this.marks.addEventListener("blur", () => this.drawMarks());
    this.width = 0;
    this.observer = new ResizeObserver(() => {
      if (this.host.clientWidth !== this.width) this.paint();
    });
    this.observer.observe(host);
  }

  /** Stop watching the size. */
  close() {
    this.observer.disconnect();
  }

  /**
   * Say what the grid is, for screen readers.
   * @param {string} label
   * @param {string} descriptionId id of the element that describes it
   */
  describe(label, descriptionId) {
    this.marks.setAttribute("aria-label", label);
    this.marks.setAttribute("aria-describedby", descriptionId);
  }

  /**
   * Show a pool.
   * @param {GridPicture} picture
   * @param {ReturnType<typeof import("./inks.js").readTheme>} theme
   */
  show(picture, theme) {
    this.picture = picture;
    this.theme = theme;
    if (this.cursor >= picture.count) this.cursor = picture.count - 1;
    if (this.pinned >= picture.count) this.pinned = -1;
    this.paint();
    // Who came here before the first pages did stands on none yet.
    if (this.cursor < 0 && document.activeElement === this.marks) this.focus();
  }

  /** Paint everything again, at the host's size. */
  paint() {
    this.width = this.host.clientWidth;
    if (this.theme === null || this.width === 0) return;
    const begin = performance.now();
    const { count, kinds, tiles } = this.picture;
    this.grid = gridOf(count, this.width, Math.max(220, Math.min(460, 0.5 * globalThis.innerHeight)));
    const { size, columns } = this.grid;
    const rows = Math.max(1, this.grid.rows);
    this.ratio = globalThis.devicePixelRatio || 1;
    this.gap = size >= 14 ? 2 : size >= 5 ? 1 : 0;
    this.inner = size - this.gap;
    // Many squares are painted one pixel for each CSS pixel: they have no detail that more would show.
    const scale = count > FINE ? 1 : this.ratio;
    const side = Math.max(2, Math.round(size * scale));
    resize(this.pages, columns * side, rows * side, columns * size, rows * size);
    resize(this.marks, Math.round(columns * size * this.ratio), Math.round(rows * size * this.ratio), columns * size, rows * size);
    const context = this.pages.getContext("2d");
    if (count > 0) paintTiles(context, { ...this.grid, side, gap: Math.round(this.gap * scale), count }, kinds, tiles);
    else context.clearRect(0, 0, this.pages.width, this.pages.height);
    this.times.pages = performance.now() - begin;
    this.drawMarks();
  }

  /** Paint what moves: the chosen branch, the next evictions, the cursor. */
  drawMarks() {
    if (this.theme === null || this.ratio === undefined) return;
    const begin = performance.now();
    const context = this.marks.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.grid.columns * this.grid.size, this.grid.rows * this.grid.size);
    this.drawEvictions(context);
    this.drawChosen(context);
    const focused = document.activeElement === this.marks;
    if (this.pinned >= 0) this.frame(context, this.pinned, css(this.theme.accent), 2);
    if (this.hovered >= 0) this.frame(context, this.hovered, css(this.theme.text), 1.5);
    if (focused && this.cursor >= 0) this.frame(context, this.cursor, css(this.theme.text), 2);
    this.times.marks = performance.now() - begin;
  }

  /** Dim all pages but those of the chosen branch, and join these in their order. */
  drawChosen(context) {
    const { chosen, count } = this.picture;
    if (chosen.length === 0) return;
    const { inner } = this;
    const { columns, rows, size } = this.grid;
    context.fillStyle = css(this.theme.ground, 0.55);
    context.beginPath();
    context.rect(0, 0, columns * size, (rows - 1) * size);
    context.rect(0, (rows - 1) * size, (count - (rows - 1) * columns) * size, size);
    for (const page of new Set(chosen)) context.rect(...this.corner(page), inner, inner);
    context.fill("evenodd");
    if (size < 4) return;
    context.strokeStyle = css(this.theme.text, 0.55);
    context.lineWidth = Math.max(1, size / 12);
    context.lineJoin = "round";
    context.beginPath();
    chosen.forEach((page, at) => {
      const [x, y] = this.corner(page);
      // A run of pages that goes on in the next row needs no line across the grid.
      const follows = at > 0 && !(page === chosen[at - 1] + 1 && page % columns === 0);
      if (follows) context.lineTo(x + inner / 2, y + inner / 2);
      else context.moveTo(x + inner / 2, y + inner / 2);
    });
    context.stroke();
    const [x, y] = this.corner(chosen[0]);
    context.fillStyle = css(this.theme.text);
    context.beginPath();
    context.arc(x + inner / 2, y + inner / 2, Math.max(2, inner / 5), 0, 2 * Math.PI);
    context.fill();
  }

  /** Frame what the next evictions take, the first ones strongest; large squares get their number. */
  drawEvictions(context) {
    const { inner } = this;
    const labelled = inner >= 15;
    context.lineWidth = Math.max(1, Math.min(2, inner / 5));
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `600 ${Math.round(inner * 0.52)}px ${this.theme.font}`;
    const half = context.lineWidth / 2;
    const strengths = [];
    for (const [page, place] of this.picture.evictions) {
      const strength = Math.min(place, STRONG_EVICTIONS);
      (strengths[strength] ??= []).push([page, place]);
    }
    strengths.forEach((pages, strength) => {
      const alpha = 1 - (0.6 * strength) / STRONG_EVICTIONS;
      context.strokeStyle = css(this.theme.eviction, alpha);
      context.beginPath();
      for (const [page] of pages) {
        const [x, y] = this.corner(page);
        if (this.grid.size < 5) context.rect(x + 0.5, y + 0.5, 1, 1);
        else context.rect(x + half, y + half, inner - 2 * half, inner - 2 * half);
      }
      context.stroke();
      if (!labelled) return;
      context.fillStyle = css(this.theme.text, alpha);
      for (const [page, place] of pages) {
        const [x, y] = this.corner(page);
        if (place < 99) context.fillText(String(place + 1), x + inner / 2, y + inner / 2 + 0.5);
      }
    });
  }

  /** Frame one page. */
  frame(context, page, style, width) {
    const [x, y] = this.corner(page);
    context.strokeStyle = css(this.theme.ground);
    context.lineWidth = width + 2;
    context.strokeRect(x, y, this.inner, this.inner);
    context.strokeStyle = style;
    context.lineWidth = width;
    context.strokeRect(x, y, this.inner, this.inner);
  }

  /** Return a page's left upper corner in CSS pixels. */
  corner(page) {
    const { columns, size } = this.grid;
    const row = Math.floor(page / columns);
    return [(page - row * columns) * size, row * size];
  }

  /** Return the page under the pointer, or -1. */
  pageAt(event) {
    const { columns, size } = this.grid;
    const column = Math.floor(event.offsetX / size);
    const row = Math.floor(event.offsetY / size);
    if (column < 0 || column >= columns || row < 0) return -1;
    const page = row * columns + column;
    return page < this.picture.count ? page : -1;
  }

  hover(event) {
    const page = this.pageAt(event);
    if (page === this.hovered) return;
    this.hovered = page;
    this.drawMarks();
    if (page >= 0) this.calls.onMove(page, "pointer");
    else this.calls.onLeave();
  }

  leave() {
    this.hovered = -1;
    this.drawMarks();
    this.calls.onLeave();
  }

  focus() {
    if (this.cursor < 0 && this.picture.count > 0) this.cursor = Math.max(0, this.pinned);
    this.drawMarks();
    if (this.cursor >= 0) this.calls.onMove(this.cursor, "keys");
  }

  pick(page) {
    if (page < 0) return;
    this.cursor = page;
    this.pinned = this.pinned === page ? -1 : page;
    this.drawMarks();
    this.calls.onPick(this.pinned);
  }

  key(event) {
    const { columns } = this.grid;
    const last = this.picture.count - 1;
    const row = Math.floor(this.cursor / columns) * columns;
    const steps = {
      ArrowLeft: this.cursor - 1,
      ArrowRight: this.cursor + 1,
      ArrowUp: this.cursor - columns,
      ArrowDown: this.cursor + columns,
      PageUp: this.cursor - 10 * columns,
      PageDown: this.cursor + 10 * columns,
      Home: event.ctrlKey ? 0 : row,
      End: event.ctrlKey ? last : Math.min(last, row + columns - 1),
    };
    if (event.key === "Enter" || event.key === " ") this.pick(this.cursor);
    else if (event.key in steps && last >= 0) this.moveTo(steps[event.key]);
    else return;
    event.preventDefault();
  }

  /**
   * Put the cursor onto a page, within the pool, and bring it into view.
   * @param {number} page
   */
  moveTo(page) {
    this.cursor = Math.min(this.picture.count - 1, Math.max(0, page));
    this.hovered = -1;
    const [, top] = this.corner(this.cursor);
    const scroller = this.stack.parentElement;
    const bottom = top + this.grid.size;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    else if (bottom > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = bottom - scroller.clientHeight;
    this.drawMarks();
    this.calls.onMove(this.cursor, "keys");
  }
}

/** Give a canvas a size in pixels and one on the page. */
function resize(canvas, wide, high, cssWidth, cssHeight) {
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  canvas.style.width = `${cssWidth}px`;
  canvas.style.height = `${cssHeight}px`;
}
