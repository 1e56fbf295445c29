// One message: its text, what belongs to it, and what can be done with it.

import { codeBlock, copied } from "./code.js";
import { grow } from "./composer.js";
import { drafts } from "./kept.js";
import { Markdown } from "./markdown.js";
import { fullText } from "./tree.js";
import { WhyBar, isFull } from "./why.js";

const ROLES = { user: "You", assistant: "Answer", system: "System message", tool: "Tool result" };

/** Return what helps against an error of the server, in a sentence. */
function helpFor(error) {
  const { code, status, message = "" } = error;
  if (code === "unreachable" || status === 0) return "The server cannot be reached. Your text is kept here; try again when it is back.";
  if (code === "context_length_exceeded") return "The conversation does not fit into the model's context. Shorten the message, take files out, or go back to an earlier message and branch there.";
  if (code === "pool_exhausted" || code === "quota_exceeded") return "The server's memory for states is full. Unpin or delete branches that you do not need, or try again later.";
  if (code === "session_limit") return "The server holds no more sessions. Delete conversations, or turn off “Hold branches as sessions” in the settings.";
  if (status === 429 || status === 503) return "The server is busy. Try again in a moment.";
  if (status === 401) return "The server needs an API key, or another one: the key button is at the top.";
  if (/template/i.test(message)) return "The model's chat template refuses these messages: often a system message, or two messages of one role in a row. Change them and try again.";
  if (status === 404) return "What this continues is gone from the server. Trying again sends the whole conversation.";
  return "Change the message or the settings, and try again.";
}

/** Return a JSON object or list with a line for each value; null for any other text. */
function indented(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" ? JSON.stringify(value, null, 2) : null;
  } catch {
    return null;
  }
}

export class Message {
  /** @param {object} chat the view @param {object} thread where it is shown @param {object} node */
  constructor(chat, thread, node) {
    this.chat = chat;
    this.app = chat.app;
    this.thread = thread;
    this.id = node.id;
    this.role = node.role;
    const { el } = this.app;
    this.head = el("header.message-head");
    // What the reader did not write may be long, and then scrolls.
    const scrolls = ["system", "tool"].includes(node.role) ? { tabindex: "0", role: "region", "aria-label": ROLES[node.role] } : {};
    this.body = el("div.message-body", scrolls);
    this.actions = el("div.message-actions", { role: "group", "aria-label": "What can be done" });
    this.error = el("div.message-error", { role: "alert", hidden: true });
    this.why = node.role === "assistant" ? new WhyBar(chat, node.id) : null;
    this.element = el("article.message", { class: `role-${node.role}`, tabindex: "0", dataset: { id: node.id } }, this.head, this.body, this.error, this.why ? el("footer.message-foot", {}, this.why.element, this.actions) : null);
    this.app.keys(this.element, {
      ArrowLeft: () => this.atSelf() && this.thread.turn(this.id, -1),
      ArrowRight: () => this.atSelf() && this.thread.turn(this.id, 1),
      ArrowUp: () => this.atSelf() && this.thread.walk(this.element, -1),
      ArrowDown: () => this.atSelf() && this.thread.walk(this.element, 1),
      E: () => this.edit(),
      R: () => this.role === "assistant" && this.thread.regenerate(this.id),
      C: () => this.copy(),
      B: () => this.thread.rewind(this.id),
      M: () => this.menu(),
    });
  }

  get node() {
    return this.chat.tree.get(this.id);
  }

  /** Whether the answer is under way here; in another window it may be, or have been cut off. */
  get isRunning() {
    return this.chat.runs.has(this.id);
  }

  /** Whether the key was pressed on the message itself; within it, keys scroll. */
  atSelf() {
    return document.activeElement === this.element;
  }

  /** Whether it is a question at the end of its branch. */
  get isUnanswered() {
    const ends = this.thread.leaf === this.id && !this.thread.choices?.length;
    return this.role === "user" && (ends || !this.chat.tree.children(this.id).length);
  }

  // -- drawing ---------------------------------------------------------------------

  draw() {
    const { node } = this;
    if (!node || this.editing) return;
    this.drawHead(node);
    this.drawBody(node);
    this.drawError(node);
    this.drawActions(node);
    this.why?.show(node);
    this.element.setAttribute("aria-busy", String(this.isRunning));
    this.element.setAttribute("aria-label", this.label(node));
  }

  label(node) {
    const siblings = this.chat.tree.siblings(this.id);
    const place = siblings.length > 1 ? `, branch ${siblings.findIndex((one) => one.id === this.id) + 1} of ${siblings.length}` : "";
    return `${ROLES[node.role] ?? node.role}${place}`;
  }

  drawHead(node) {
    const { el, fill, icon, named } = this.app;
    const siblings = this.chat.tree.siblings(this.id);
    const at = siblings.findIndex((one) => one.id === this.id);
    const turn = (by, name, label) =>
      el("button.icon-button.small", { type: "button", "aria-label": label, title: label, disabled: !siblings[at + by], onclick: () => this.thread.turn(this.id, by) }, icon(name));
    const tag = (name, text, title) => el("span.tag", { title }, icon(name), text);
    fill(
      this.head,
      el("span.message-role", { title: new Date(node.created).toLocaleString() }, node.role === "tool" ? `Result of ${this.app.visible(node.tool ?? "a tool", 60)}` : ROLES[node.role] ?? node.role),
      node.name ? el("span.tag", {}, icon("tag"), named(node.name)) : null,
      node.commit ? tag("commit", this.app.visible(node.commit.name, 40), `commit ${node.commit.id}`) : null,
      node.pin ? tag("pin", "pinned", "Its state stays in the server's memory") : null,
      node.edited ? tag("edit", "edited", "You changed this answer") : null,
      node.copied ? tag("copy", "kept", "Taken over behind a message that was edited") : null,
      node.pending && !this.isRunning ? tag("warn", "not finished", "It is being written in another window, or was cut off") : null,
      node.session?.exact === false ? tag("warn", "approximate", "Its state was blended after an edit") : null,
      el("span.push"),
      siblings.length > 1 ? el("span.siblings", { role: "group", "aria-label": "Branches here" }, turn(-1, "left", "Earlier branch"), el("span.sibling-count", { "aria-live": "off" }, `${at + 1}/${siblings.length}`), turn(1, "right", "Later branch")) : null,
      this.why ? null : this.actions,
    );
  }

  drawBody(node) {
    const { el } = this.app;
    if (!this.drawn) {
      this.drawn = true;
      this.thoughts = el("details.thoughts", { hidden: true }, el("summary", {}, this.app.icon("bulb"), el("span.thoughts-title", {}, "Thoughts")), (this.thoughtText = el("div.thoughts-text", { dir: "auto" })));
      this.text = new Markdown(this.app);
      this.files = el("ul.message-files");
      this.calls = el("div.calls");
      this.reading = el("span.reading", { "aria-hidden": "true" });
      this.waiting = el("p.waiting", { role: "status", hidden: true }, el("span.dots", { "aria-hidden": "true" }, el("i"), el("i"), el("i")), el("span.sr-only", {}, "The answer is coming"), this.reading);
      this.app.fill(this.body, this.thoughts, this.text.element, this.files, this.calls, this.waiting);
    }
    this.thoughts.hidden = !node.reasoning;
    if (node.reasoning) {
      this.thoughtText.textContent = node.reasoning;
      this.thoughts.querySelector(".thoughts-title").textContent = this.isRunning && !node.content ? "Thinking…" : "Thoughts";
    }
    if (node.role === "user" || node.role === "system" || node.role === "tool") this.plain(node.content);
    else if (this.asWritten) this.text.written(node.content);
    else this.text.show(node.content);
    this.text.element.hidden = !node.content;
    this.drawFiles(node);
    this.drawCalls(node);
    this.waiting.hidden = !(this.isRunning && !node.content && !node.calls?.length);
    this.drawProgress();
  }

  /** Say how much of the prompt is read. */
  drawProgress() {
    const { el, fill, format } = this.app;
    const { total, cache, processed } = this.chat.runs.progress(this.id) ?? {};
    if (!total || this.waiting.hidden) return fill(this.reading);
    const share = (processed - cache) / Math.max(1, total - cache);
    return fill(this.reading, el("span.meter", {}, el("span", { style: { width: `${100 * share}%` } })), `${format.number(processed)} of ${format.count(total, "token")} read`);
  }

  /** What people wrote is shown as they wrote it; Markdown within it too, if it has code or formulas. */
  plain(content) {
    if (this.shown === content) return;
    this.shown = content;
    const json = this.role === "tool" ? indented(content) : null;
    if (json !== null) return void this.app.fill(this.text.element, codeBlock(this.app, json, "json"));
    if (/```|\$\$|\\\(|\\\[|^\s*[-*\d]+[.)]? /m.test(content) && content.length < 100_000 && this.role !== "tool") this.text.show(content);
    else this.app.fill(this.text.element, this.app.el("p.plain", { dir: "auto" }, content.length < 100_000 ? content.split(/([\n\t])/).map((part) => (/^[\n\t]$/.test(part) ? part : this.app.textNodes(part))) : content));
  }

  drawFiles(node) {
    const { el, fill, icon, named, format } = this.app;
    const files = node.files ?? [];
    const key = files.map((one) => one.name + one.text.length).join("\n");
    if (key === this.filesKey) return;
    this.filesKey = key;
    fill(this.files, files.map(({ name, text }) => el("li", {}, el("details.file", {}, el("summary", {}, icon("attach"), named(name), el("span.hint", {}, format.bytes(text.length))), el("pre", { tabindex: "0" }, text.length > 20_000 ? `${text.slice(0, 20_000)}…` : text)))));
  }

  drawCalls(node) {
    const { el, fill, icon, visible } = this.app;
    const key = JSON.stringify([node.calls ?? [], this.isRunning]);
    if (key === this.callsKey) return;
    this.callsKey = key;
    const shown = (node.calls ?? []).map((call) => {
      // What is cut short or still coming is shown as it is.
      const text = indented(call.function.arguments) ?? call.function.arguments;
      return el("figure.call", {}, el("figcaption", {}, icon("tool"), "Calls ", el("code", {}, visible(call.function.name, 100))), el("pre", { tabindex: "0", dir: "ltr" }, text));
    });
    const answered = this.chat.tree.children(this.id).some((one) => one.role === "tool");
    fill(this.calls, shown, shown.length && !this.isRunning && !answered ? this.resultForm(node) : null);
  }

  /** Ask for the results of the tools that the model calls. */
  resultForm(node) {
    const { el, icon } = this.app;
    const areas = node.calls.map((call, at) => {
      const place = `${this.id}.${at}`;
      const area = el("textarea.textarea.mono", { rows: 2, id: `result-${place}`, value: drafts.get(place).text, oninput: () => drafts.put(place, area.value) });
      return { call, area, place, row: el("div.field", {}, el("label", { for: area.id }, `Result of ${this.app.visible(call.function.name, 60)}`), area) };
    });
    const send = (event) => {
      event.preventDefault();
      let parent = this.id;
      for (const { call, area, place } of areas) {
        parent = this.chat.tree.add(parent, { role: "tool", content: area.value, callId: call.id, tool: call.function.name }).id;
        drafts.drop(place);
      }
      this.thread.answer(parent);
    };
    return el("form.results", { onsubmit: send }, areas.map((one) => one.row), el("button.button.primary.small", { type: "submit" }, icon("send"), "Send the results"));
  }

  drawError(node) {
    const { el, fill, visible, icon } = this.app;
    this.error.hidden = !node.error;
    if (!node.error) return;
    fill(
      this.error,
      el("p", {}, icon("warn"), " ", el("strong", {}, "The answer failed. "), visible(node.error.message, 500)),
      el("p", {}, helpFor(node.error)),
      el("div.button-row", {}, el("button.button.small", { type: "button", onclick: () => this.thread.again(this.id) }, icon("again"), "Try again")),
    );
  }

  drawActions(node) {
    const { el, fill, icon } = this.app;
    const key = JSON.stringify([this.isRunning, node.pending, node.finish, Boolean(node.content), this.isUnanswered]);
    if (key === this.actionsKey) return;
    const focused = this.actions.contains(document.activeElement);
    this.actionsKey = key;
    this.actions.classList.toggle("kept", this.isRunning || this.isUnanswered);
    const button = (name, label, hint, onclick) => el("button.icon-button.small", { type: "button", "aria-label": label, title: hint ? `${label} (${hint})` : label, onclick }, icon(name));
    if (this.isRunning) {
      fill(this.actions, el("button.button.small", { type: "button", onclick: () => this.chat.runs.stop(this.id) }, icon("stop"), "Stop"));
    } else {
      const cut = node.role === "assistant" && node.content && (node.pending || ["length", "stopped", "error"].includes(node.finish)) && !isFull(this.app, node);
      fill(
        this.actions,
        cut ? el("button.button.small", { type: "button", onclick: () => this.thread.proceed(this.id) }, icon("play"), "Continue") : null,
        this.isUnanswered ? el("button.button.small", { type: "button", onclick: () => this.thread.answer(this.id) }, icon("play"), "Answer") : null,
        button("copy", "Copy", "C", () => this.copy()),
        button("edit", "Edit", "E", () => this.edit()),
        node.role === "assistant" ? button("again", "Another answer", "R", () => this.thread.regenerate(this.id)) : null,
        button("more", "More", "M", () => this.menu()),
      );
    }
    if (focused) (this.actions.querySelector("button") ?? this.element).focus();
  }

  /** Show the answer as the model wrote it, or as Markdown again. */
  turnWritten() {
    this.asWritten = !this.asWritten;
    this.text.clear();
  }

  // -- doing -------------------------------------------------------------------------

  copy() {
    const { node } = this;
    return copied(this.app, node.role === "user" ? fullText(node) : node.content, this.actions.querySelector("[aria-label=Copy]"));
  }

  menu() {
    return this.chat.messageMenu(this.thread, this.id, this.actions.lastElementChild ?? this.element);
  }

  /** Change the message. What is typed is kept until it is sent or given up. */
  edit() {
    const { el, icon } = this.app;
    const { node } = this;
    if (this.isRunning || this.editing) return;
    this.editing = true;
    const place = `edit.${this.id}`;
    const draft = drafts.get(place).text || node.content;
    const area = el("textarea.textarea.edit-area", { rows: 2, value: draft, dir: "auto", "aria-label": "The message" });
    const fit = () => grow(area, 0.5);
    area.addEventListener("input", () => (drafts.put(place, area.value), fit()));
    const follows = this.chat.tree.children(this.id).length > 0;
    const close = () => {
      this.editing = false;
      form.remove();
      this.element.classList.remove("editing");
      this.draw();
      this.element.focus();
    };
    const done = (work) => () => {
      const text = area.value;
      drafts.drop(place);
      close();
      if (text !== node.content || node.role === "user") work(text);
    };
    const isUser = node.role === "user";
    const main = done((text) => this.thread.editTo(this.id, text, { answer: isUser }));
    const button = (text, work, props = {}) => el("button.button.small", { type: "button", onclick: work, ...props }, text);
    const form = el(
      "div.edit",
      {},
      area,
      el(
        "div.button-row",
        {},
        button([icon("fork"), isUser ? "Branch and answer" : "Save as a branch"], main, { class: "primary", title: "Control+Enter" }),
        follows ? button("Keep what follows", done((text) => this.thread.editMiddle(this.id, text, "exact")), { title: "The messages behind it stay; they run again with the next question" }) : null,
        follows && this.chat.canBlend ? button("Keep it, blended", done((text) => this.thread.editMiddle(this.id, text, "blend")), { title: "The state of what follows is moved, and a part of it is computed again: quicker, and approximate" }) : null,
        button("Cancel", () => (drafts.drop(place), close())),
      ),
      el("p.hint", {}, follows ? "What follows stays in the branch beside, unless you keep it behind the new text." : isUser ? "The message as it was stays in the branch beside." : "The model goes on from the new text. The answer as it was stays in the branch beside."),
    );
    this.app.keys(form, { "Control+Enter": main, Escape: () => (drafts.drop(place), close()) });
    this.element.classList.add("editing");
    this.body.after(form);
    fit();
    area.focus();
  }
}
