// A branch as it is read: its messages from the first to the last, and what is done in it.

import { Message } from "./message.js";
import { titleOf } from "./tree.js";

/** Pixels from the end within which a thread follows what is written. */
const NEAR = 80;

export class Thread {
  /** @param {object} chat the view @param {{leaf: string|null, moved: (leaf: string|null) => void, close?: () => void}} options */
  constructor(chat, { leaf, moved, close }) {
    this.chat = chat;
    this.app = chat.app;
    this.leaf = leaf;
    this.moved = moved;
    /** Answers among which the reader chooses: ids, or null. */
    this.choices = null;
    this.messages = new Map();
    const { el, icon } = this.app;
    this.list = el("div.messages");
    this.scroller = el("div.thread-scroll", { tabindex: "-1" }, this.list);
    this.down = el("button.icon-button.to-end", { type: "button", hidden: true, "aria-label": "To the end", title: "To the end", onclick: () => this.toEnd(true) }, icon("send"));
    this.headline = el("h2.thread-name");
    this.element = el("section.thread", { "aria-label": "Branch" }, el("header.thread-head", {}, this.headline, close ? el("button.icon-button.small", { type: "button", "aria-label": "Close this branch", title: "Close this branch", onclick: close }, icon("close")) : null), this.scroller, this.down);
    this.place = close ? "Second branch" : "First branch";
    this.scroller.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.follows = true;
    // Code and formulas take their room once their libraries are there.
    new ResizeObserver(() => this.follows && this.toEnd()).observe(this.list);
  }

  get tree() {
    return this.chat.tree;
  }

  // -- drawing ---------------------------------------------------------------------

  draw() {
    const { tree } = this;
    if (this.leaf && !tree.get(this.leaf)) {
      if (tree.size) this.app.notify("Another window has deleted this branch; what is left is shown");
      this.leaf = tree.leafBelow(null);
    }
    const path = tree.path(this.leaf);
    const wanted = path.map((node) => this.messageOf(node));
    this.choices = this.choices?.filter((id) => tree.get(id)) ?? null;
    const nodes = wanted.map((message) => message.element);
    if (this.choices?.length) nodes.push(this.drawChoices());
    if (!nodes.length) nodes.push(this.chat.welcome());
    const kept = new Set(nodes);
    for (const node of [...this.list.children]) if (!kept.has(node)) node.remove();
    nodes.forEach((node, at) => this.list.children[at] !== node && this.list.insertBefore(node, this.list.children[at] ?? null));
    for (const message of wanted) message.draw();
    const shown = new Set([...path.map((node) => node.id), ...(this.choices ?? [])]);
    for (const id of [...this.messages.keys()]) if (!shown.has(id)) this.messages.delete(id);
    this.headline.textContent = path.findLast((node) => node.name)?.name ?? this.place;
    if (this.follows) this.toEnd();
  }

  messageOf(node) {
    let found = this.messages.get(node.id);
    if (!found) this.messages.set(node.id, (found = new Message(this.chat, this, node)));
    return found;
  }

  /** Show several answers beside each other, to choose one. */
  drawChoices() {
    const { el, icon } = this.app;
    const key = this.choices.join();
    if (this.choiceBox?.dataset.key !== key) {
      const card = (id, at) => {
        const message = this.messageOf(this.tree.get(id));
        return el("div.choice", {}, message.element, el("button.button", { type: "button", onclick: () => this.choose(id) }, icon("check"), `Take answer ${at + 1}`));
      };
      this.choiceBox = el("section.choices", { "aria-label": `${this.choices.length} answers to choose from`, dataset: { key } }, this.choices.map(card));
    }
    for (const id of this.choices) this.messageOf(this.tree.get(id)).draw();
    return this.choiceBox;
  }

  /** Draw one message again: a piece of an answer has come. */
  update(id) {
    const message = this.messages.get(id);
    if (!message) return;
    message.draw();
    if (this.follows) this.toEnd();
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR;
    this.down.hidden = this.follows;
  }

  toEnd(smooth = false) {
    this.follows = true;
    this.down.hidden = true;
    this.scroller.scrollTo({ top: this.scroller.scrollHeight, behavior: smooth && !this.app.reducedMotion ? "smooth" : "auto" });
  }

  // -- going between branches -------------------------------------------------------------

  /** Show the branch that ends with a message. */
  go(leaf, { focus = null } = {}) {
    this.leaf = leaf;
    this.choices = null;
    this.tree.visit(leaf);
    this.moved(leaf);
    this.draw();
    if (focus) this.messages.get(focus)?.element.focus();
  }

  /** Go to the branch beside the present one at a message. */
  turn(id, by) {
    const siblings = this.tree.siblings(id);
    const next = siblings[siblings.findIndex((one) => one.id === id) + by];
    if (!next) return this.app.announce("There is no further branch");
    this.follows = false;
    this.go(this.tree.leafBelow(next.id), { focus: next.id });
    this.app.announce(`Branch ${siblings.indexOf(next) + 1} of ${siblings.length}`);
    return undefined;
  }

  walk(element, by) {
    const all = [...this.list.querySelectorAll("article.message")];
    const next = all[all.indexOf(element) + by];
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  }

  /** End the branch with a message; what follows stays a branch beside. */
  rewind(id) {
    const behind = this.tree.path(this.leaf).length - this.tree.path(id).length;
    this.follows = true;
    this.go(id);
    this.app.announce(`The branch ends here now; ${this.app.format.count(behind, "message")} behind it ${behind === 1 ? "stays" : "stay"} as a branch`);
    this.chat.composer.focus();
  }

  // -- asking --------------------------------------------------------------------------------

  /** Add a message behind the branch, and answer it `count` times. */
  ask(content, files, count) {
    const { tree } = this;
    let parent = this.choices?.length ? this.choices[0] : this.leaf;
    if (parent === null && tree.settings.system?.trim()) parent = tree.add(null, { role: "system", content: tree.settings.system.trim() }).id;
    if (!tree.title) [tree.title, tree.titled] = [titleOf(content || files[0]?.name || ""), Date.now()];
    const node = tree.add(parent, { role: "user", content, ...(files.length ? { files } : {}) });
    this.answer(node.id, count);
  }

  /** Answer a message, once or several times. */
  answer(parent, count = 1) {
    this.follows = true;
    if (count === 1) {
      const id = this.chat.runs.answer(parent);
      this.go(id);
      return;
    }
    this.go(parent);
    const { seed } = this.tree.settings.sampling ?? {};
    // The same seed would give the same answer each time.
    this.choices = Array.from({ length: count }, (_, at) => this.chat.runs.answer(parent, seed === undefined ? {} : { sampling: { ...this.tree.settings.sampling, seed: seed + at } }));
    this.draw();
    this.app.announce(`${count} answers are coming; take one of them`);
  }

  choose(id) {
    this.go(id, { focus: id });
    this.app.announce("Taken. The others stay as branches.");
  }

  /** Make another answer beside one. */
  regenerate(id) {
    const node = this.tree.get(id);
    if (node.parent === null) return this.app.announce("There is no question before it");
    this.answer(node.parent);
    return undefined;
  }

  /** Try again what failed: without a trace if nothing had come. */
  again(id) {
    const { parent, content } = this.tree.get(id);
    if (!content) this.tree.remove(id);
    this.answer(parent);
  }

  proceed(id) {
    this.follows = true;
    this.chat.runs.proceed(id);
    this.draw();
  }

  // -- editing -------------------------------------------------------------------------------

  /** Make a branch with another text in a message's place. */
  editTo(id, text, { answer }) {
    const node = this.tree.get(id);
    const fields = { role: node.role, content: text };
    if (node.files) fields.files = node.files;
    if (node.role !== "user") fields.edited = true;
    const made = this.tree.add(node.parent, fields);
    if (answer) this.answer(made.id);
    else {
      this.go(made.id, { focus: made.id });
      this.chat.library.touch();
    }
  }

  /** Edit a message in the middle: what follows stays behind it. */
  async editMiddle(id, text, mode) {
    const { tree } = this;
    const old = this.leaf;
    const node = tree.get(id);
    const fields = { role: node.role, content: text, ...(node.files ? { files: node.files } : {}), edited: true };
    const made = tree.add(node.parent, fields);
    const leaf = tree.copyBelow(id, old, made.id);
    this.go(leaf);
    this.chat.library.touch();
    if (mode === "blend" || this.chat.runs.holds(tree.settings)) await this.chat.held.editMiddle({ old, id, made: made.id, leaf, text, mode });
    this.draw();
  }
}
