// The History view: all branches as one tree over tokens.

import { askToFork, askToRewind, sessionId } from "../lib/edits.js";
import { Comparison } from "./history/compare.js";
import { branchWithin, Details } from "./history/details.js";
import { makeScale } from "./history/scale.js";
import { buildTree, rowsOf } from "./history/tree.js";
import { kindNames, kindWords, TreeList } from "./history/tree_list.js";

export const title = "History";
export const help = [
  ["↑ ↓ Home End", "Walk through the tree"],
  ["→ ←", "Open or close what is within; go into it, or out of it"],
  ["Enter", "Show the details"],
  ["C", "Compare: press it on one branch, then on another"],
  ["F", "Fork, or open as a session"],
  ["R", "Rewind a session"],
  ["Z", "Zoom to the tokens of the row; 0 shows all"],
  ["Escape", "Close the details, or end comparing"],
];

const SEARCH_WAIT = 150;
/** Milliseconds after which a row that was walked to is in the address. Browsers slow down pages that
 * change it many times a second. */
const WALK_WAIT = 150;
const TRIES = 16;

/** @param {HTMLElement} root @param {object} app */
export async function mount(root, app) {
  await app.css("views/history.css");
  const view = new HistoryView(root, app);
  await view.load();
  return { update: (change) => view.update(change), unmount: () => clearTimeout(view.walking) };
}

class HistoryView {
  constructor(root, app) {
    this.app = app;
    this.tree = buildTree({ branches: [], nodes: [] });
    this.closed = new Set();
    this.zoom = null;
    this.loading = null;
    this.stale = false;
    this.drawnAs = null;
    this.list = new TreeList(app, {
      select: (item) => this.selected(item),
      open: (item) => this.open(item),
      toggle: (item, open) => this.toggle(item, open),
      zoomTo: (range) => this.zoomTo(range),
      keys: {
        C: (item) => this.compare(item),
        F: (item) => this.fork(item),
        R: (item) => this.rewind(item),
        Z: (item) => this.zoomTo([item.start, Math.max(item.end, item.start + 1)]),
        0: () => this.zoomTo(null),
        Escape: () => this.escape(),
      },
    });
    this.details = new Details(app, {
      close: () => this.close(),
      choose: (item) => this.open(item),
      compare: (item) => this.compare(item),
      changed: (id, tokens) => this.reloadTo(id, tokens),
    });
    this.comparison = new Comparison(app, { close: () => this.endComparing(), swap: () => this.swap() });
    this.empty = app.el("div.empty", { hidden: true });
    this.body = app.el("div.history-body", {}, app.el("div.history-tree", {}, this.list.element, this.empty), this.details.element, this.comparison.element);
    root.append(this.toolbar(), this.body);
  }

  // -- the toolbar ------------------------------------------------------------------

  toolbar() {
    const { el, icon } = this.app;
    this.search = el("input.input", {
      type: "search",
      "aria-label": "Search by name, id or text",
      placeholder: "Search names and texts",
      value: this.app.params.q ?? "",
      oninput: () => {
        clearTimeout(this.typing);
        this.typing = setTimeout(() => this.app.set({ q: this.search.value }), SEARCH_WAIT);
      },
    });
    this.app.keys(this.search, { ArrowDown: () => this.list.tree.focus(), Escape: () => this.clearSearch() });
    this.kinds = el("div.kinds", { role: "group", "aria-label": "Kinds of branches" });
    this.count = el("span.hint", { role: "status" });
    this.scaleButton = el("button.button.small", {
      type: "button",
      title: "Give every piece between two partings room to be seen",
      onclick: () => this.app.set({ scale: this.app.params.scale === "even" ? null : "even" }),
    }, icon("zoom"), "Even");
    this.zoomButton = el("button.button.small", { type: "button", hidden: true, onclick: () => this.zoomTo(null) }, "Show all positions");
    return el(
      "div.toolbar",
      { role: "group", "aria-label": "What the tree shows" },
      el("div.search", {}, icon("search"), this.search),
      this.kinds,
      el("span.spacer"),
      this.count,
      this.zoomButton,
      this.scaleButton,
      el("button.button.small", { type: "button", onclick: () => this.openAll() }, "Open all"),
      el("button.button.small", { type: "button", onclick: () => this.closeAll() }, "Close all"),
    );
  }

  drawKinds() {
    const { el, icon, fill, format } = this.app;
    const chosen = this.chosenKinds();
    const focused = this.kinds.contains(document.activeElement) ? document.activeElement.dataset.kind : null;
    const button = ([kind, count]) =>
      el(
        "button.button.small",
        {
          type: "button",
          "aria-pressed": String(chosen !== null && chosen.has(kind)),
          title: `Show only this kind: ${kindWords(kind)}`,
          dataset: { kind },
          onclick: () => this.toggleKind(kind),
        },
        icon(kind, { class: `kind-${kind}` }),
        el("span.kind-word", {}, kindNames[kind] ?? kind),
        format.number(count),
      );
    fill(this.kinds, [...this.tree.kinds].sort(([a], [b]) => order(a) - order(b)).map(button));
    if (focused) this.kinds.querySelector(`[data-kind="${CSS.escape(focused)}"]`)?.focus();
  }

  chosenKinds() {
    const { kinds } = this.app.params;
    return kinds ? new Set(kinds.split(",")) : null;
  }

  toggleKind(kind) {
    const chosen = this.chosenKinds() ?? new Set();
    if (!chosen.delete(kind)) chosen.add(kind);
    this.app.set({ kinds: [...chosen].join(",") });
  }

  clearSearch() {
    if (!this.search.value) return false;
    this.search.value = "";
    this.app.set({ q: null });
    return true;
  }

  // -- data ----------------------------------------------------------------------------

  update(change) {
    if (change.kind === "params") this.draw();
    else if (change.kind === "events") {
      if (names(change.data, "history")) this.loadSoon();
    } else if (change.kind === "reconnected" || change.kind === "restart") return this.load();
    return undefined;
  }

  /** Load once more when the load that runs is done, so that a busy server is not asked all the time. */
  loadSoon() {
    if (this.loading) this.stale = true;
    else this.load();
  }

  async load() {
    if (this.loading) {
      this.stale = true;
      return this.loading;
    }
    this.loading = this.read();
    try {
      await this.loading;
    } catch (error) {
      this.app.fail(error);
      if (!this.tree.items.size && !this.app.isAbort(error)) this.say("The history could not be loaded", error.message);
    } finally {
      this.loading = null;
    }
    if (this.stale && !this.app.signal.aborted) {
      this.stale = false;
      setTimeout(() => this.load(), 250);
    }
    return undefined;
  }

  async read() {
    const doc = await this.app.get("v1/state/history");
    this.tree = buildTree(doc);
    this.drawnAs = null;
    this.draw();
  }

  /** Load until a branch is there, with as many tokens as it has now, and show it. Many viewers share
   * one reading of the state, so the first one may be older than the change. */
  async reloadTo(id, tokens = null) {
    for (let tries = 0; tries < TRIES && !this.app.signal.aborted; tries++) {
      await this.load();
      const item = this.tree.items.get(id);
      if (item && (tokens === null || item.branch.num_tokens === tokens)) return this.open(item, { focus: true });
      await new Promise((resolve) => setTimeout(resolve, 100 + 50 * tries));
    }
    return undefined;
  }

  // -- drawing ---------------------------------------------------------------------------

  draw() {
    const { params } = this.app;
    const { a, b, branch, q: query = "" } = params;
    const chosen = this.tree.items.get(branch);
    if (chosen && branch !== this.adopted) this.list.current = chosen;
    this.adopted = chosen ? branch : null;
    const key = JSON.stringify([query, params.kinds, params.scale, a, b, this.zoom, [...this.closed]]);
    if (this.drawnAs === key) {
      if (this.list.current) this.list.select(this.list.current, { reveal: false });
      this.drawPanels(chosen);
      return;
    }
    this.drawnAs = key;
    if (document.activeElement !== this.search) this.search.value = query;
    const rows = rowsOf(this.tree, { closed: this.closed, query, kinds: this.chosenKinds() });
    const kind = params.scale === "even" ? "even" : "linear";
    this.scaleButton.setAttribute("aria-pressed", String(kind === "even"));
    this.zoomButton.hidden = this.zoom === null;
    const scale = makeScale(kind, this.tree.items.values(), this.zoom ?? [0, this.tree.end]);
    this.list.show(rows, scale, new Map([[b, "B"], [a, "A"]].filter(([id]) => id)));
    this.drawKinds();
    this.drawCount(rows);
    this.drawPanels(chosen);
  }

  drawCount(rows) {
    const { params, format } = this.app;
    const all = [...this.tree.kinds.values()].reduce((sum, one) => sum + one, 0);
    const found = rows.filter((row) => row.matches && row.item.branch).length;
    const whole = format.count(all, "branch", "branches");
    const said = params.q || params.kinds ? `${format.number(found)} of ${whole}` : whole;
    if (this.count.textContent !== said) this.count.textContent = said;
    this.drawEmpty(rows.length, all);
  }

  drawEmpty(seen, all) {
    this.empty.hidden = seen > 0;
    this.list.element.hidden = seen === 0;
    if (seen) return;
    if (all) this.say("Nothing matches", "No branch has this name, id or text.");
    else this.say("Nothing here yet", "Sessions, requests, cached prefixes and commits appear here as soon as there are some.");
  }

  say(head, text) {
    const { el, fill } = this.app;
    fill(this.empty, el("h2", {}, head), el("p", {}, text));
    this.empty.hidden = false;
    this.list.element.hidden = true;
  }

  drawPanels(chosen) {
    const { a, b, details } = this.app.params;
    const [first, second] = [this.tree.items.get(a), this.tree.items.get(b)];
    const comparing = Boolean(a);
    if (comparing) {
      this.details.hide();
      this.comparison.show(first ?? null, second ?? null, { a, b });
    } else {
      this.comparison.hide();
      if (chosen && details) this.details.show(chosen);
      else this.details.hide();
    }
    this.body.classList.toggle("with-panel", comparing || Boolean(chosen && details));
    this.body.classList.toggle("comparing", comparing);
  }

  // -- what the reader does --------------------------------------------------------------------

  selected(item) {
    clearTimeout(this.walking);
    this.walking = setTimeout(() => this.app.set({ branch: item.id }), WALK_WAIT);
  }

  open(item, { focus = false } = {}) {
    clearTimeout(this.walking);
    const { a, b } = this.app.params;
    this.unfold(item);
    if (a && !b && item.branch && item.id !== a) {
      this.app.set({ branch: item.id, b: item.id });
      return;
    }
    const hidden = this.list.places.has(item.id) ? {} : { q: null, kinds: null };
    this.app.set({ branch: item.id, details: 1, ...hidden });
    this.list.select(item);
    if (focus) this.details.show(item, { focus: true });
  }

  /** Open what an item is within, so that it is seen. */
  unfold(item) {
    let changed = false;
    for (let one = item.parent; one; one = one.parent) changed = this.closed.delete(one.id) || changed;
    if (changed) this.draw();
  }

  toggle(item, open) {
    if (open) this.closed.delete(item.id);
    else this.closed.add(item.id);
    this.draw();
  }

  openAll() {
    this.closed.clear();
    this.draw();
  }

  closeAll() {
    for (const item of this.tree.items.values()) if (item.children.length) this.closed.add(item.id);
    this.list.current = null;
    this.draw();
  }

  zoomTo(range) {
    const whole = range === null || (range[0] <= 0 && range[1] >= this.tree.end);
    this.zoom = whole ? null : [range[0], Math.max(range[0] + 1, Math.min(range[1], this.tree.end))];
    this.draw();
    this.app.announce(whole ? "All positions" : `Positions ${this.zoom[0]} to ${this.zoom[1]}`);
  }

  close() {
    this.app.set({ details: null });
    this.list.tree.focus();
  }

  escape() {
    if (this.app.params.a) this.endComparing();
    else if (this.app.params.details) this.close();
    else return false;
    return true;
  }

  async fork(item) {
    const branch = item.branch ?? branchWithin(item);
    if (!this.mayEdit() || !branch) return;
    const made = await askToFork(this.app, branch, this.details.item === item ? this.details.at : Math.min(item.end, branch.num_tokens));
    if (made !== null) await this.reloadTo(`session:${made}`);
  }

  async rewind(item) {
    if (!this.mayEdit()) return;
    if (sessionId(item.branch) === null) return void this.app.announce("Only sessions can be rewound");
    const to = this.details.item === item ? this.details.at : item.end;
    const left = await askToRewind(this.app, item.branch, to);
    if (left !== null) await this.reloadTo(item.id, left);
  }

  mayEdit() {
    if (this.app.overview?.allow_edits) return true;
    this.app.notify("This server lets the page only read; quire serve --allow-edits offers changes");
    return false;
  }

  compare(item) {
    clearTimeout(this.walking);
    if (!item.branch) return void this.app.announce("Choose a branch to compare");
    const { a } = this.app.params;
    if (a && a !== item.id) {
      this.app.set({ b: item.id, branch: item.id });
      return;
    }
    this.app.set({ a: item.id, b: null, details: null, branch: item.id });
    this.app.announce("First branch chosen; choose the second");
    this.list.tree.focus();
  }

  swap() {
    const { a, b } = this.app.params;
    this.app.set({ a: b, b: a });
  }

  endComparing() {
    const { a } = this.app.params;
    this.app.set({ a: null, b: null, branch: a });
    this.list.tree.focus();
  }
}

function order(kind) {
  const at = Object.keys(kindNames).indexOf(kind);
  return at < 0 ? Infinity : at;
}

/** Return whether an event names a document, or does not say what changed. */
function names(data, what) {
  const list = data?.changed ?? data?.documents;
  return !Array.isArray(list) || list.includes(what);
}
