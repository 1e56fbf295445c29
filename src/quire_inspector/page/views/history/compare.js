// Two branches side by side: where they part, what each goes on with, and how probable that was.

import { tokensOf } from "../../lib/edits.js";
import { tokenWords } from "../../lib/tokens.js";
import { labelOf } from "./tree.js";
import { kindWords } from "./tree_list.js";

const BEFORE = 60;
const BEHIND = 200;

export class Comparison {
  /** @param {object} app @param {{close: () => void, swap: () => void}} actions */
  constructor(app, actions) {
    this.app = app;
    this.actions = actions;
    this.shown = null;
    this.element = app.el("section.details.comparison", { "aria-label": "Comparison", hidden: true });
    app.keys(this.element, { Escape: () => actions.close() });
  }

  hide() {
    this.element.hidden = true;
    this.shown = null;
    this.reading?.abort();
  }

  /** Show two items; null: it is not chosen yet, or is gone (`ids` says which). */
  show(first, second, ids) {
    const lengths = [first, second].map((item) => item?.branch?.num_tokens ?? null);
    const key = JSON.stringify([ids.a, ids.b, lengths, Boolean(first), Boolean(second)]);
    if (this.shown === key) return;
    this.shown = key;
    this.element.hidden = false;
    this.reading?.abort();
    const gone = !first ? ids.a : ids.b && !second ? ids.b : null;
    if (gone) return this.frame(this.app.el("p.hint", {}, `${this.app.visible(gone, 80)} is gone.`));
    if (!second) {
      return this.frame(
        this.app.el("p", {}, "Choose the second branch in the tree: click it, or go to it and press C or Enter."),
        this.app.el("p.hint", {}, "First: ", this.app.named(labelOf(first))),
      );
    }
    this.frame(this.app.el("p.hint", { role: "status" }, "Comparing…"));
    this.load(first, second);
    return undefined;
  }

  frame(...children) {
    const { el, icon, fill } = this.app;
    fill(
      this.element,
      el(
        "header.details-head",
        {},
        el("div.details-title", {}, el("h2", { tabindex: "-1" }, icon("compare"), "Compare")),
        el("button.icon-button", { type: "button", "aria-label": "End comparing", onclick: () => this.actions.close() }, icon("close")),
      ),
      el("div.details-body", {}, children),
    );
  }

  async load(first, second) {
    const { app } = this;
    this.reading = new AbortController();
    const { signal } = this.reading;
    try {
      const [a, b] = [first.branch.id, second.branch.id];
      const found = await app.get("v1/state/compare", { a, b }, { signal });
      const start = Math.max(0, found.shared - BEFORE);
      const texts = await Promise.all([a, b].map((id, at) => tokensOf(app, id, start, Math.min([found.a, found.b][at].num_tokens, found.shared + BEHIND), { signal })));
      this.draw(first, second, found, texts);
    } catch (error) {
      if (app.isAbort(error)) return;
      this.frame(
        app.el("p.form-error", { role: "alert" }, error.message),
        app.el("div", {}, app.el("button.button.small", { type: "button", onclick: () => ((this.shown = null), this.show(first, second, { a: first.id, b: second.id })) }, "Try again")),
      );
    }
  }

  draw(first, second, found, texts) {
    const { el, format, icon } = this.app;
    const { shared, a, b } = found;
    const same = shared === a.num_tokens && shared === b.num_tokens;
    const within = !same && (shared === a.num_tokens || shared === b.num_tokens);
    let said = `The first ${format.count(shared, "token")} are the same; they part at position ${format.number(shared)}.`;
    if (same) said = `Both have the same ${format.count(shared, "token")}.`;
    else if (within) said = `The first ${format.count(shared, "token")} are the same; ${shared === a.num_tokens ? "A" : "B"} ends there and the other goes on.`;
    else if (!shared) said = "They have no beginning in common.";
    const facts = [];
    if (found.kl_ab !== null) facts.push(el("dt", {}, "Divergence"), el("dd", {}, `${format.number(found.kl_ab, 4)} nats from A to B, ${format.number(found.kl_ba, 4)} back`));
    if (found.num_run) facts.push(el("dt", {}, "To compare"), el("dd", {}, `${format.count(found.num_run, "token")} were run on forks`));
    this.frame(
      el("p", { role: "status", class: "parting" }, said),
      el("div", {}, el("button.button.small", { type: "button", onclick: () => this.actions.swap() }, icon("compare"), "Swap")),
      el("div.sides", {}, this.side("A", first, a, shared, texts[0]), this.side("B", second, b, shared, texts[1])),
      facts.length ? el("dl.facts", {}, facts) : null,
    );
  }

  side(letter, item, side, shared, tokens) {
    const { el, icon, named, format } = this.app;
    const next = side.token ?? (side.id === null ? null : { id: side.id, text: side.text });
    const parts = tokens.map((token) => {
      const kind = token.position < shared ? "shared" : token.position === shared ? "first" : "";
      const text = token.text === null ? `[${token.id}]` : this.app.textNodes(token.text, { lines: true });
      return kind === "first" ? el("mark.first", {}, text) : el("span", { class: kind }, text);
    });
    return el(
      "section.side",
      { "aria-label": `${letter}: ${this.app.visible(labelOf(item), 80)}` },
      el("h3", {}, el("span.tag.mark", {}, letter), icon(item.kind, { class: `kind-${item.kind}` }), named(labelOf(item))),
      el("p.hint", {}, `${kindWords(item.kind)}, ${format.count(side.num_tokens, "token")}${side.adapter ? `, adapter ${this.app.visible(side.adapter, 40)}` : ""}${side.exact ? "" : ", not exact"}`),
      el("pre.side-text", { tabindex: "0", "aria-label": `Text of ${letter} where they part` }, parts),
      next ? el("p", {}, "Goes on with ", el("code", {}, tokenWords(next)), side.token ? `: ${format.share(side.token.probability)}, rank ${format.number(side.token.rank)}` : "") : el("p", {}, "Ends here."),
      this.odds(side),
    );
  }

  /** The most probable next tokens, and those with which both sides went on. */
  odds(side) {
    const { el, format } = this.app;
    const rows = new Map();
    for (const one of [...side.alternatives, side.token, side.other]) if (one) rows.set(one.id, one);
    if (!rows.size) return null;
    const listed = [...rows.values()].sort((x, y) => x.rank - y.rank).slice(0, 12);
    const line = (one) => {
      const chosen = one.id === side.token?.id;
      const words = chosen ? " (its own)" : one.id === side.other?.id ? " (the other's)" : "";
      return el(
        "li",
        { class: chosen ? "chosen" : "" },
        el("span.name", { title: `token ${one.id}, rank ${one.rank}` }, tokenWords(one), words),
        el("span.meter", { "aria-hidden": "true" }, el("span", { style: { width: `${Math.max(0.5, one.probability * 100)}%` } })),
        el("span.share", {}, format.share(one.probability)),
      );
    };
    return el("ol.odds", { "aria-label": "Probabilities of the next token" }, listed.map(line));
  }
}
