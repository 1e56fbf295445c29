// "See why": what an answer cost, and what the server reused for it. A press opens the explanation and
// the ways to the token's chances, its attention and its pages.

const ENDS = {
  length: "cut at the limit of tokens",
  stopped: "stopped",
  error: "failed",
  tool_calls: "calls tools",
};

/** Return whether an answer was cut because nothing more fits into the context. */
export function isFull(app, { finish, usage }) {
  return finish === "length" && usage?.prompt + usage?.completion >= (app.overview?.model?.max_length ?? Infinity);
}

/** Return the numbers of an answer: [label, value, explanation], of those that are known. */
function figuresOf(app, node) {
  const { format } = app;
  const { usage, quire = {}, seconds, finish } = node;
  const found = [];
  const { reuse, blend, speculation } = quire;
  if (usage) {
    const cached = reuse?.cached ?? usage.cached ?? 0;
    const blended = blend?.blended ?? 0;
    found.push(["reused", format.number(cached), "tokens of the prompt whose state was there and did not run again"]);
    if (reuse?.replayed) found.push(["replayed", format.number(reuse.replayed), "tokens that ran again because a window or recurrent layer had let them go"]);
    if (blended) found.push(["blended", format.number(blended), "tokens whose state was moved here from another place, approximately"]);
    if (blend?.recomputed) found.push(["recomputed", format.number(blend.recomputed), "of the tokens with cached state, those that were computed again"]);
    found.push(["computed", format.number(Math.max(0, usage.prompt - cached - blended)), "tokens of the prompt that ran for this answer"]);
    found.push(["written", format.number(usage.completion), "tokens of the answer"]);
  }
  if (speculation?.drafted) found.push(["drafts accepted", `${format.number(speculation.accepted)} of ${format.number(speculation.drafted)}`, "tokens that were guessed and checked together"]);
  if (seconds) {
    found.push(["first token", format.seconds(seconds.first), "from the request to the first token"]);
    if (usage?.completion > 1 && seconds.rest > 0) found.push(["tokens/s", format.number((usage.completion - 1) / seconds.rest, 1), "tokens a second after the first one"]);
  }
  if (isFull(app, node)) found.push(["end", "cut where the context ends", "the conversation fills the context; go back to an earlier message and branch there"]);
  else if (ENDS[finish]) found.push(["end", ENDS[finish], ""]);
  return found;
}

export class WhyBar {
  /** @param {object} chat the view @param {string} id the answer */
  constructor(chat, id) {
    this.chat = chat;
    this.app = chat.app;
    this.id = id;
    this.more = this.app.el("div.why-more", { hidden: true });
    this.row = this.app.el("button.why-row", { type: "button", "aria-expanded": "false", onclick: () => this.toggle() });
    this.speed = this.app.el("span.why-speed", { hidden: true });
    this.element = this.app.el("div.why", {}, this.speed, this.row, this.more);
  }

  show(node) {
    const { el, fill } = this.app;
    const figures = figuresOf(this.app, node);
    const running = this.chat.runs.has(this.id);
    this.element.hidden = !figures.some(([label]) => label !== "end");
    this.speed.hidden = !running;
    this.row.hidden = running;
    if (running) {
      // What was reused and why is known at the end.
      const told = figures.filter(([label]) => ["written", "tokens/s"].includes(label)).map(([label, value]) => `${value} ${label}`);
      this.speed.textContent = told.join(", ");
      return;
    }
    const brief = figures.filter(([label]) => !["computed", "recomputed"].includes(label));
    fill(
      this.row,
      el("span.why-title", {}, "Why"),
      brief.map(([label, value]) => el("span.why-item", { class: label === "end" ? "why-end" : null }, label === "end" ? value : [el("b", {}, value), ` ${label}`])),
    );
    this.row.setAttribute("aria-label", `See why: ${brief.map(([label, value]) => `${value} ${label === "end" ? "" : label}`.trim()).join(", ")}`);
    if (!this.more.hidden) this.explain(node, figures);
  }

  toggle() {
    this.more.hidden = !this.more.hidden;
    this.row.setAttribute("aria-expanded", String(!this.more.hidden));
    const node = this.chat.tree.get(this.id);
    if (node && !this.more.hidden) this.explain(node, figuresOf(this.app, node));
  }

  explain(node, figures) {
    const { el, fill, visible, icon } = this.app;
    const { reuse, blend } = node.quire ?? {};
    const rows = figures.map(([label, value, text]) => [el("dt", {}, label), el("dd", {}, value, text ? el("span.hint", {}, ` ${text}`) : null)]);
    const said = [reuse?.reason, blend?.reason, blend?.warning].filter(Boolean).map((text) => el("p.hint", {}, visible(text, 400)));
    const tiers = Object.entries(reuse?.by_tier ?? {}).map(([tier, count]) => `${count} from ${tier}`).join(", ");
    const can = this.app.overview?.allow_edits === true;
    const go = (name, text, view, params) =>
      el("button.button.small", { type: "button", disabled: !can, onclick: () => this.chat.look(this.id, view, params) }, icon(name), text);
    fill(
      this.more,
      el("dl.facts", {}, rows),
      tiers ? el("p.hint", {}, `Reused: ${tiers}.`) : null,
      said,
      el("div.why-links", {}, go("token", "Chances and attention", "token", {}), go("pages", "Its pages", "pages", {}), go("history", "In the history", "history", {})),
      can ? null : el("p.hint", {}, "These need quire serve --allow-edits, since they hold the answer in a session."),
    );
  }
}
