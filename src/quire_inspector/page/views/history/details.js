// The details of one item of the tree: its facts, its positions, and what can be done with it.

import { askToFork, askToRewind, rewindCost, sessionId, tokensOf } from "../../lib/edits.js";
import { TokenStrip } from "../../lib/tokens.js";
import { drawPositions } from "./positions.js";
import { labelOf } from "./tree.js";
import { kindWords } from "./tree_list.js";

/** Tokens shown on either side of the chosen position. */
const AROUND = 160;
const MOST_BRANCHES = 30;

/** Return the first branch at or below an item, whose tokens the item's are. */
export function branchWithin(item) {
  for (let one = item; one; one = one.children[0]) if (one.branch) return one.branch;
  return null;
}

/**
 * The panel beside the tree. `actions`: close(), choose(item), compare(item), changed(id, tokens).
 */
export class Details {
  constructor(app, actions) {
    this.app = app;
    this.actions = actions;
    this.item = null;
    this.at = null;
    this.element = app.el("section.details", { "aria-label": "Details", hidden: true });
    app.keys(this.element, { Escape: () => actions.close() });
  }

  /** Show an item; `at`: the position to begin with. `anew`: its numbers may have changed. */
  show(item, { at = null, focus = false } = {}) {
    const same = this.item?.id === item.id;
    const before = this.item;
    this.item = item;
    if (!same) this.at = at ?? item.end;
    else if (this.at > item.end || this.at === before.end) this.at = item.end;
    if (same && !focus && this.fits(before, item)) {
      this.update();
      return;
    }
    this.draw();
    if (focus) this.heading.focus();
  }

  /** Whether only numbers differ, so that the panel need not be made anew under the reader's hands. */
  fits(before, item) {
    return before.end === item.end && before.start === item.start && JSON.stringify(before.branch) === JSON.stringify(item.branch) && before.below === item.below;
  }

  update() {
    this.element.hidden = false;
  }

  hide() {
    this.element.hidden = true;
    this.item = null;
  }

  draw() {
    const { el, icon, named, fill } = this.app;
    const { item } = this;
    const title = item.kind === "run" ? `Shared by ${item.below} branches` : named(labelOf(item));
    this.heading = el("h2", { tabindex: "-1" }, icon(item.kind, { class: `kind-${item.kind}` }), title);
    const close = el("button.icon-button", { type: "button", "aria-label": "Close the details", onclick: () => this.actions.close() }, icon("close"));
    const subtitle = item.kind === "run" ? "" : ` ${item.id}`;
    const focused = this.element.contains(document.activeElement);
    fill(
      this.element,
      el("header.details-head", {}, el("div.details-title", {}, this.heading, el("p.hint.mono", {}, kindWords(item.kind), this.app.textNodes(subtitle))), close),
      el("div.details-body", {}, this.buttons(), this.facts(), this.positions(), this.within()),
    );
    this.element.hidden = false;
    if (focused) this.heading.focus();
    this.cut(this.at, { quiet: true });
    this.loadText();
  }

  // -- what can be done ---------------------------------------------------------

  get branch() {
    return this.item.branch ?? branchWithin(this.item);
  }

  buttons() {
    const { el, icon, go, overview } = this.app;
    const { item, branch } = this;
    if (!branch) return null;
    const button = (name, text, onclick, props = {}) => el("button.button.small", { type: "button", onclick, ...props }, icon(name), text);
    const found = [button("compare", "Compare…", () => this.actions.compare(item), { title: "Compare with another branch (C)", hidden: !item.branch })];
    if (overview?.allow_edits) {
      const own = sessionId(item.branch) !== null;
      found.push(button("fork", own ? "Fork…" : "Open as session…", () => this.fork(), { title: "Make a session of the kept tokens (F)" }));
      if (own) found.push(button("rewind", "Rewind…", () => this.rewind(), { title: "Remove the last tokens (R)", disabled: branch.busy }));
      if (own) found.push(button("playground", "Playground", () => go("playground", { open: sessionId(item.branch) })));
    }
    found.push(button("token", "Token", () => go("token", { branch: branch.id, position: Math.max(0, Math.min(this.at, branch.num_tokens) - 1) })));
    if (branch.pages) found.push(button("pages", "Pages", () => go("pages", { branch: branch.id })));
    return el("div.actions", {}, found);
  }

  async fork() {
    const made = await askToFork(this.app, this.branch, Math.min(this.at, this.branch.num_tokens));
    if (made !== null) this.actions.changed(`session:${made}`);
  }

  async rewind() {
    if (sessionId(this.item.branch) === null) return;
    const { id } = this.item;
    const left = await askToRewind(this.app, this.item.branch, this.at);
    if (left !== null) this.actions.changed(id, left);
  }

  // -- facts ------------------------------------------------------------------------

  facts() {
    const { el, format, named } = this.app;
    const { item } = this;
    const rows = [];
    const row = (name, value) => rows.push(el("dt", {}, name), el("dd", {}, value));
    row("Tokens", item.start && item.end > item.start ? `${format.number(item.end)}, the last ${format.number(item.end - item.start)} of its own` : format.number(item.end));
    const { branch } = item;
    if (branch) {
      row("Computed", branch.computed >= branch.num_tokens ? "all" : `${format.number(branch.computed)}; ${format.number(branch.num_tokens - branch.computed)} to run`);
      row("Pages", branch.pages ? `${format.number(branch.pages)}, ${branch.shared_pages ? `${format.number(branch.shared_pages)} shared` : "none shared"}` : "none in the pool");
      if (branch.window) row("Window", `${format.number(branch.window[0])} tokens, the first ${format.number(branch.window[1])} among them`);
      if (branch.adapter) row("Adapter", named(branch.adapter));
      if (branch.checkpoints.length) row("Checkpoints", `${format.number(branch.checkpoints.length)} of recurrent layers`);
      if (branch.last_commit) row("Last commit", el("span.mono", {}, this.app.visible(branch.last_commit, 16)));
    }
    if (item.key) row("Model", item.key.adapter ? ["adapter ", named(item.key.adapter)] : "the base model");
    if (item.key?.salt) row("Salt", named(item.key.salt));
    const tags = [];
    if (branch?.busy) tags.push("busy");
    if (branch?.pinned) tags.push("pinned");
    if (branch?.modified) tags.push("state written into");
    if (branch && !branch.exact) tags.push("not exact");
    if (tags.length) row("State", tags.map((tag) => el("span.tag", { class: tag.startsWith("not") || tag.startsWith("state") ? "warn" : "" }, tag)));
    return el("dl.facts", {}, rows);
  }

  // -- positions and text -----------------------------------------------------------

  positions() {
    const { el } = this.app;
    const { item } = this;
    this.slider = el("input", {
      type: "range",
      min: 0,
      max: item.end,
      step: 1,
      value: this.at,
      "aria-label": "Tokens to keep",
      oninput: () => this.cut(Number(this.slider.value)),
      onchange: () => this.loadText(),
    });
    this.slider.value = String(this.at);
    this.said = el("p.cut-said", { role: "status" });
    this.strip = new TokenStrip({
      label: "Text; pick the last token to keep",
      pick: ({ position }) => {
        this.cut(position + 1);
        this.slider.value = String(position + 1);
      },
      keys: { F: () => this.app.overview?.allow_edits && this.fork(), R: () => this.app.overview?.allow_edits && this.rewind() },
    });
    this.chart = el("div.positions-chart");
    this.note = el("p.hint");
    return el(
      "div.positions",
      {},
      el("h3", {}, "Positions"),
      this.chart,
      this.slider,
      this.said,
      el("h3", {}, "Text"),
      this.strip.element,
      this.note,
    );
  }

  /** Choose how many tokens are kept, and say what a rewind to there would cost. */
  cut(at, { quiet = false } = {}) {
    const { item } = this;
    this.at = Math.max(0, Math.min(item.end, at));
    drawPositions(this.app, this.chart, { item, at: this.at });
    this.strip.cut(this.at);
    const kept = `The first ${this.app.format.number(this.at)} of ${this.app.format.number(item.end)} tokens`;
    this.slider.setAttribute("aria-valuetext", kept);
    this.said.textContent = kept;
    clearTimeout(this.asking);
    const id = sessionId(item.branch);
    if (id === null) return;
    this.asking = setTimeout(() => this.askCost(id, kept), quiet ? 0 : 200);
  }

  async askCost(id, kept) {
    const { at, app } = this;
    this.question?.abort();
    this.question = new AbortController();
    try {
      const cost = await rewindCost(app, id, at, { signal: this.question.signal });
      if (this.at !== at || cost === null) return;
      const again = cost ? `${app.format.count(cost, "token")} are run again` : "nothing is run again";
      this.said.textContent = `${kept}. A rewind to here: ${again}.`;
    } catch (error) {
      if (!app.isAbort(error)) this.said.textContent = `${kept}. ${error.message}`;
    }
  }

  /** Load the tokens around the chosen position. */
  async loadText() {
    const { item, branch, app } = this;
    const start = Math.max(0, this.at - AROUND);
    const stop = Math.min(item.end, this.at + AROUND);
    if (!branch || stop <= start) {
      this.strip.set([]);
      this.note.textContent = "No tokens.";
      return;
    }
    this.reading?.abort();
    this.reading = new AbortController();
    try {
      const tokens = await tokensOf(app, branch.id, start, stop, { signal: this.reading.signal });
      if (this.item !== item) return;
      this.strip.set(tokens);
      this.strip.cut(this.at);
      this.strip.goTo(this.at - 1, { quiet: true });
      this.note.textContent = `Positions ${app.format.number(start)} to ${app.format.number(stop)} of ${app.format.number(item.end)}. A token that is picked is the last one to keep.`;
      this.keepInSight();
    } catch (error) {
      if (app.isAbort(error)) return;
      this.strip.set([]);
      this.note.textContent = error.message;
    }
  }

  keepInSight() {
    const node = this.strip.nodes[this.strip.index];
    if (!node) return;
    const box = this.strip.element;
    box.scrollTop = node.offsetTop - box.offsetTop - box.clientHeight / 2;
  }

  // -- what goes on from here ----------------------------------------------------------

  within() {
    const { el, icon, named, format } = this.app;
    const { children } = this.item;
    if (!children.length) return null;
    const link = (item) =>
      el(
        "li",
        {},
        el(
          "button.within",
          { type: "button", onclick: () => this.actions.choose(item) },
          icon(item.kind, { class: `kind-${item.kind}` }),
          item.kind === "run" ? `${item.below} branches` : named(labelOf(item)),
          el("span.within-text", {}, this.app.textNodes(item.head)),
        ),
      );
    const more = children.length - MOST_BRANCHES;
    return el(
      "div",
      {},
      el("h3", {}, `Here ${format.count(children.length, "way")} part${children.length === 1 ? "s" : ""}`),
      el("ul.within-list", {}, children.slice(0, MOST_BRANCHES).map(link)),
      more > 0 ? el("p.hint", {}, `and ${format.number(more)} more, in the tree`) : null,
    );
  }
}
