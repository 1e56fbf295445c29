// The tree on the screen. Only rows that can be seen are in the document, so that thousands are fluid.

import { labelOf } from "./tree.js";

const OVERSCAN = 6;
const MOST_RAILS = 40;
const KIND_NAMES = { session: "Sessions", request: "Requests", cached: "Cached", cache: "Cache rows", commit: "Commits", other: "Others" };
const KIND_WORDS = {
  session: "session",
  request: "request",
  cached: "cached prefix",
  cache: "row of a KV cache",
  commit: "commit",
  other: "copy of a call",
  run: "shared tokens",
};

/** Kinds in the order in which they are listed, and what they are called. */
export const kindNames = Object.freeze(KIND_NAMES);

/** Return a kind of branch in words. */
export const kindWords = (kind) => KIND_WORDS[kind] ?? kind;

/**
 * A tree for keyboard, mouse and screen reader. The focus stays on the tree, which names the row at
 * which the reader is (`aria-activedescendant`).
 */
export class TreeList {
  /**
   * @param {object} app
   * @param {{select: (item: object) => void, open: (item: object) => void, toggle: (item: object, open: boolean) => void,
   *   zoomTo: (range: [number, number]) => void, keys: Object<string, (item: object) => any>}} actions
   */
  constructor(app, actions) {
    this.app = app;
    this.actions = actions;
    this.rows = [];
    this.scale = null;
    this.current = null;
    this.marks = new Map();
    this.drawn = new Map();
    const { el } = app;
    this.axis = el("div.axis", { "aria-hidden": "true" }, el("span.axis-title", {}, "Positions of tokens"), (this.ticks = el("div.axis-ticks")));
    this.space = el("div.tree-space", { role: "none" });
    this.tree = el("div.tree", { role: "tree", tabindex: "0", "aria-label": "Branches by the tokens that they share", onfocus: () => this.focused() }, this.space);
    this.element = el("div.tree-scroll", { onscroll: () => this.soon() }, this.axis, this.tree);
    this.resize = new ResizeObserver(() => this.redraw());
    this.resize.observe(this.element);
    app.signal.addEventListener("abort", () => this.resize.disconnect());
    this.listen();
  }

  listen() {
    const { keys } = this.app;
    const step = (by) => () => this.move(this.index() + by);
    const page = (by) => () => this.move(this.index() + by * Math.max(1, Math.floor(this.element.clientHeight / this.height) - 2));
    const table = {
      ArrowDown: step(1),
      ArrowUp: step(-1),
      PageDown: page(1),
      PageUp: page(-1),
      Home: () => this.move(0),
      End: () => this.move(this.rows.length - 1),
      ArrowRight: () => this.inwards(),
      ArrowLeft: () => this.outwards(),
      Enter: () => this.current && this.actions.open(this.current),
      " ": () => this.current && this.actions.open(this.current),
    };
    for (const [key, fn] of Object.entries(this.actions.keys)) table[key] = () => (this.current ? fn(this.current) : false);
    keys(this.tree, table);
    this.tree.addEventListener("click", (event) => {
      const { row, node } = this.hit(event);
      if (!row) return;
      this.select(row.item);
      if (node.closest(".twisty") && row.expandable) this.actions.toggle(row.item, !row.expanded);
      else this.actions.open(row.item);
    });
    this.tree.addEventListener("dblclick", (event) => {
      const { row, node } = this.hit(event);
      if (row && node.closest(".track")) this.actions.zoomTo([row.item.start, row.item.end]);
    });
    this.brush();
  }

  /** Return the row that was clicked, and the node within. A row that was drawn anew between press and
   * release is found by its place. */
  hit(event) {
    const of = (node) => this.rows[Number(node?.closest?.("[data-row]")?.dataset.row ?? -1)];
    const under = document.elementFromPoint(event.clientX, event.clientY);
    const node = of(event.target) ? event.target : under;
    return { row: of(node), node };
  }

  /** Dragging along the axis zooms to what was dragged over; the wheel with Control zooms as well. */
  brush() {
    let from = null;
    const at = (event) => {
      const box = this.ticks.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    };
    const veil = this.app.el("div.axis-veil", { hidden: true });
    this.axis.addEventListener("pointerdown", (event) => {
      from = at(event);
      this.axis.setPointerCapture(event.pointerId);
    });
    this.axis.addEventListener("pointermove", (event) => {
      if (from === null) return;
      const to = at(event);
      if (!veil.isConnected) this.ticks.append(veil);
      veil.hidden = false;
      veil.style.left = `${Math.min(from, to) * 100}%`;
      veil.style.width = `${Math.abs(to - from) * 100}%`;
    });
    this.axis.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const [left, right] = [from, at(event)].sort((a, b) => a - b);
      from = null;
      veil.hidden = true;
      if (right - left > 0.01) this.actions.zoomTo([Math.floor(this.scale.position(left)), Math.ceil(this.scale.position(right))]);
    });
    this.axis.addEventListener("pointercancel", () => (from = null));
    this.axis.addEventListener("dblclick", () => this.actions.zoomTo(null));
    this.element.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey || !this.scale) return;
        event.preventDefault();
        const here = this.scale.position(at(event));
        const [first, last] = this.scale.domain;
        const by = Math.exp(event.deltaY * 0.002);
        this.actions.zoomTo([Math.max(0, Math.floor(here - (here - first) * by)), Math.ceil(here + (last - here) * by)]);
      },
      { passive: false },
    );
  }

  // -- what is shown ----------------------------------------------------------

  /** Show other rows, or the same on another scale. `marks`: words by item ("A", "B" of a comparison). */
  show(rows, scale, marks = new Map()) {
    this.rows = rows;
    this.scale = scale;
    this.marks = marks;
    this.places = new Map(rows.map((row, index) => [row.item.id, index]));
    if (this.current) this.current = rows[this.places.get(this.current.id) ?? -1]?.item ?? this.current;
    this.redraw();
  }

  get height() {
    return this.element.clientWidth < 560 ? 54 : 30;
  }

  index() {
    return this.current ? (this.places.get(this.current.id) ?? -1) : -1;
  }

  /** Make an item the one at which the reader is, and bring it into sight. */
  select(item, { reveal = true } = {}) {
    this.current = item;
    if (reveal) this.reveal();
    this.draw();
    for (const [index, node] of this.drawn) this.markCurrent(node, index);
  }

  markCurrent(node, index) {
    const here = this.rows[index]?.item.id === this.current?.id;
    node.classList.toggle("current", here);
    node.setAttribute("aria-selected", String(here));
  }

  reveal() {
    const at = this.index() * this.height;
    if (at < 0) return;
    const view = this.element;
    const room = view.clientHeight - this.axis.offsetHeight;
    if (at < view.scrollTop) view.scrollTop = at;
    else if (at + this.height > view.scrollTop + room) view.scrollTop = at + this.height - room;
  }

  focused() {
    // A click chooses its own row.
    if (this.index() < 0 && this.rows.length && this.tree.matches(":focus-visible")) this.move(0);
  }

  move(index) {
    const row = this.rows[Math.min(this.rows.length - 1, Math.max(0, index))];
    if (!row) return;
    this.select(row.item);
    this.actions.select(row.item);
  }

  inwards() {
    const row = this.rows[this.index()];
    if (!row?.expandable) return;
    if (row.expanded) this.move(this.index() + 1);
    else this.actions.toggle(row.item, true);
  }

  outwards() {
    const row = this.rows[this.index()];
    if (!row) return;
    if (row.expanded) this.actions.toggle(row.item, false);
    else if (row.item.parent) this.move(this.places.get(row.item.parent.id));
  }

  // -- drawing --------------------------------------------------------------------

  soon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  redraw() {
    this.space.style.height = `${this.rows.length * this.height}px`;
    this.element.classList.toggle("narrow", this.height > 40);
    this.draw(true);
    this.drawAxis();
  }

  drawAxis() {
    if (!this.scale) return;
    const { el, format } = this.app;
    const width = this.ticks.clientWidth;
    this.app.fill(
      this.ticks,
      this.scale.ticks(width).map((one) => el("span.tick", { style: { left: `${this.scale.x(one) * 100}%` } }, format.number(one))),
    );
  }

  /** Put the rows that can be seen into the document. `anew`: also those that are there. */
  draw(anew = false) {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - OVERSCAN);
    const last = Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / this.height) + OVERSCAN);
    if (anew) {
      this.space.replaceChildren();
      this.drawn.clear();
    }
    for (const [index, node] of this.drawn) {
      if (index >= first && index < last) continue;
      node.remove();
      this.drawn.delete(index);
    }
    // In the order of the rows, which is the order in which screen readers read them.
    let before = null;
    for (let index = first; index < last; index++) {
      let node = this.drawn.get(index);
      if (!node) {
        node = this.row(index);
        this.markCurrent(node, index);
        this.drawn.set(index, node);
        if (before) before.after(node);
        else this.space.prepend(node);
      }
      before = node;
    }
    const here = this.drawn.get(this.index());
    if (here) this.tree.setAttribute("aria-activedescendant", here.id);
    else this.tree.removeAttribute("aria-activedescendant");
  }

  row(index) {
    const { el, icon, named, format } = this.app;
    const row = this.rows[index];
    const { item } = row;
    const { branch } = item;
    const mark = this.marks.get(item.id);
    const label = item.kind === "run" ? runLabel(item, el, named) : named(labelOf(item));
    const own = item.end - item.start;
    // What only screen readers are told, between what is seen.
    const said = [
      kindWords(item.kind),
      own < item.end ? `${format.number(own)} of its own` : null,
      item.kind === "run" ? "shared" : null,
      branch?.busy ? "busy" : null,
      branch?.pinned ? "pinned" : null,
      branch && branch.computed < branch.num_tokens - 1 ? `${format.number(branch.computed)} in the pool` : null,
      mark ? `${mark} of the comparison` : null,
    ];
    return el(
      "div.row",
      {
        id: `row-${index}`,
        role: "treeitem",
        "aria-level": row.level,
        "aria-setsize": row.setsize,
        "aria-posinset": row.posinset,
        "aria-expanded": row.expandable ? String(row.expanded) : null,
        class: `kind-${item.kind}${row.matches ? "" : " around"}`,
        dataset: { row: String(index), item: item.id },
        style: { transform: `translateY(${index * this.height}px)`, height: `${this.height}px` },
      },
      el(
        "div.label",
        { style: { "padding-left": `${Math.min(row.level - 1, 9) * 12 + 4}px` } },
        el("span.twisty", { class: row.expandable ? (row.expanded ? "open" : "shut") : "leaf" }, row.expandable ? icon("right") : null),
        icon(item.kind, { class: `kind-${item.kind}` }),
        el("span.row-name", {}, label),
        mark ? el("span.tag.mark", { "aria-hidden": "true" }, mark) : null,
        branch?.busy ? el("span.busy", { title: "A call works on it" }) : null,
        el("span.row-tokens", {}, format.short(item.end), el("span.sr-only", {}, ` tokens, ${said.filter(Boolean).join(", ")}: `)),
      ),
      this.track(row),
    );
  }

  track({ item, rails, expanded }) {
    const { el, textNodes } = this.app;
    const { x } = this.scale;
    const left = x(item.start);
    const right = x(item.end);
    const percent = (share) => `${(share * 100).toFixed(3)}%`;
    const lines = rails.slice(-MOST_RAILS).map(({ at, through }) => el("i.rail", { class: through ? "through" : "", style: { left: percent(x(at)) } }));
    if (expanded) lines.push(el("i.rail.from", { style: { left: percent(right) } }));
    const bar = el("i.bar", {
      class: `kind-${item.kind}${item.end === item.start ? " point" : ""}`,
      style: { left: percent(left), width: percent(right - left) },
    });
    // What is not in the pool is hatched. The last token of a session never is, and is not marked.
    const owed = item.branch && item.branch.computed < item.end - 1 ? Math.max(item.start, item.branch.computed) : item.end;
    const hatch = owed < item.end ? el("i.owed", { class: `kind-${item.kind}`, title: "Not in the pool", style: { left: percent(x(owed)), width: percent(right - x(owed)) } }) : null;
    const text = item.tail ? [textNodes(short(item.head)), " … ", textNodes(short(item.tail))] : textNodes(short(item.head));
    // Texts stand at the bar's beginning, or before it where no room is left behind.
    const side = left > 0.72 ? { right: percent(1 - left), "max-width": percent(left) } : { left: percent(Math.max(0, left)), "max-width": percent(1 - Math.max(0, left)) };
    return el("div.track", {}, lines, bar, hatch, el("span.row-text", { style: side, class: left > 0.72 ? "before" : "" }, text));
  }
}

/** Shorten runs of spaces, as those that indent code. */
const short = (text) => text.replace(/ {2,}/g, " ");

/** Return what a run is called: its adapter or salt at a root, else how many branches share it. */
function runLabel(item, el, named) {
  const parts = [];
  if (item.key?.adapter) parts.push(el("span.tag", {}, "adapter ", named(item.key.adapter)));
  if (item.key?.salt) parts.push(el("span.tag", {}, "salt ", named(item.key.salt)));
  const count = `${item.below} ${item.below === 1 ? "branch" : "branches"}`;
  return [el("span.run-name", {}, item.key && !parts.length ? `Base model, ${count}` : count), parts];
}
