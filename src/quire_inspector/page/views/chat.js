// Chat: a conversation is a tree of messages, and each message is a place to branch.

import { ChatList } from "./chat/chat_list.js";
import { Composer } from "./chat/composer.js";
import { coreOf } from "./chat/core.js";
import { Exchange } from "./chat/exchange.js";
import { Held } from "./chat/held.js";
import { chatCopies, drafts, habits } from "./chat/kept.js";
import { SettingsForm } from "./chat/settings.js";
import { Thread } from "./chat/thread.js";
import { Tree, messagesOf } from "./chat/tree.js";
import { TreePanel } from "./chat/tree_panel.js";

export const title = "Chat";
export const help = [
  ["Enter", "Send; Shift and Enter begins a line"],
  ["Escape", "Stop the answer; leave the field, so that single keys work"],
  ["↑ in an empty field", "Edit the last message"],
  ["↑ ↓", "Walk through the messages"],
  ["← →", "Go to the branch beside at a message"],
  ["E, R, C", "Edit, answer again, copy"],
  ["B", "Go back to a message, and branch there"],
  ["M", "What else can be done with a message"],
  ["N, W, S", "New conversation, its tree, its settings"],
  ["Ctrl K", "Search in the conversations"],
  ["Ctrl Shift O", "New conversation, also while you type"],
  ["Shift Escape", "Back to the field"],
];

/** Milliseconds between two looks for what other windows did. */
const LOOK = 4000;
/** Milliseconds without a key before tokens are counted. */
const COUNT = 500;

export async function mount(root, app) {
  await app.css("views/chat.css");
  const view = new Chat(root, app);
  view.begun = view.start();
  return { update: (change) => view.update(change), unmount: () => view.end() };
}

class Chat {
  constructor(root, app) {
    this.app = app;
    this.root = root;
    this.core = coreOf(app);
    this.core.view = this;
    this.library = this.core.library;
    this.runs = this.core.runs;
    this.held = new Held(this);
    this.exchange = new Exchange(this);
    this.drawnSoon = new Set();
    this.draw();
  }

  get tree() {
    return this.library.tree;
  }

  get leaf() {
    return this.threads[0].leaf;
  }

  /** Change the address, unless another view is shown by now. */
  set(...given) {
    if (!this.app.signal.aborted) this.app.set(...given);
  }

  /** Whether edits in the middle can blend what follows. */
  get canBlend() {
    return this.app.overview?.allow_edits === true;
  }

  // -- the frame of the view ---------------------------------------------------------

  draw() {
    const { app } = this;
    const { el, icon } = app;
    this.list = new ChatList(this);
    this.composer = new Composer(this);
    this.panelTree = new TreePanel(this);
    this.form = new SettingsForm(app, (settings, name) => this.settled(settings, name));
    const toggle = (name, label, hint, onclick, controls) => el("button.icon-button", { type: "button", "aria-label": label, title: hint ? `${label} (${hint})` : label, "aria-expanded": "false", "aria-controls": controls, onclick }, icon(name));
    this.sideButton = toggle("list", "Conversations", "", () => this.toggleSide(), "chat-side");
    this.treeButton = toggle("tree", "Branches", "W", () => this.togglePanel("tree"), "chat-panel");
    this.settingsButton = toggle("settings", "Settings", "S", () => this.togglePanel("settings"), "chat-panel");
    this.titleButton = el("button.chat-title", { type: "button", title: "Rename", onclick: () => this.rename() });
    this.notice = el("div.chat-notice", { role: "alert", hidden: true });
    this.threadBox = el("div.threads");
    this.panel = el("aside.chat-panel", { id: "chat-panel", hidden: true, "aria-label": "Branches" });
    this.threads = [this.makeThread(0)];
    const more = el("button.icon-button", { type: "button", "aria-label": "Export and more", title: "Export and more", onclick: () => this.exportMenu(more) }, icon("download"));
    this.shade = el("div.chat-shade", { hidden: true, onclick: () => this.closeDrawers() });
    const drop = el("div.chat-drop", { hidden: true, "aria-hidden": "true" }, icon("attach"), "Text files go to the message, state files become conversations");
    this.composer.takeDrops(this.root, drop);
    app.fill(
      this.root,
      this.list.element,
      el(
        "div.chat-main",
        {},
        el("header.chat-head", {}, this.sideButton, this.titleButton, el("span.spacer"), this.treeButton, this.settingsButton, more),
        this.notice,
        this.threadBox,
        el("div.ask-box", {}, this.composer.element),
      ),
      this.panel,
      this.shade,
      drop,
      this.exchange.input,
    );
    this.arrange();
    app.keys(this.root, {
      N: () => this.begin(),
      W: () => this.togglePanel("tree"),
      S: () => this.togglePanel("settings"),
      Escape: () => (this.runs.busy ? this.stop() : this.closeDrawers() ? undefined : false),
    });
    // These work while somebody types, too.
    app.keys(document, { "Control+K": () => this.toSearch(), "Control+Shift+O": () => this.begin(), "Shift+Escape": () => this.composer.focus() }, app.signal);
    const wide = matchMedia("(min-width: 1000px)");
    this.toggleSide(wide.matches);
    wide.addEventListener("change", () => this.toggleSide(wide.matches), { signal: app.signal });
  }

  makeThread(at, leaf = null) {
    return new Thread(this, {
      leaf,
      moved: (found) => this.moved(at, found),
      close: at ? () => this.closeBeside() : undefined,
    });
  }

  arrange() {
    this.threadBox.classList.toggle("beside", this.threads.length > 1);
    this.app.fill(this.threadBox, this.threads.map((thread) => thread.element));
  }

  get isNarrow() {
    return matchMedia("(max-width: 999px)").matches;
  }

  toggleSide(open = this.list.element.hidden) {
    this.list.element.hidden = !open;
    this.sideButton.setAttribute("aria-expanded", String(open));
    if (open && this.isNarrow) this.togglePanel(null);
    this.shade.hidden = !(this.isNarrow && (open || !this.panel.hidden));
    if (open && this.isNarrow) this.list.search.focus();
  }

  toSearch() {
    if (document.querySelector("dialog[open]")) return;
    this.toggleSide(true);
    this.list.search.select();
    this.list.search.focus();
  }

  /** Show the tree or the settings beside the conversation; null: neither. */
  togglePanel(name) {
    const open = name !== null && (this.panel.hidden || this.panel.dataset.name !== name);
    this.panel.hidden = !open;
    for (const [button, own] of [[this.treeButton, "tree"], [this.settingsButton, "settings"]]) button.setAttribute("aria-expanded", String(open && own === name));
    this.preview(null);
    if (open) {
      const { el, icon, fill } = this.app;
      const label = name === "tree" ? "Branches" : "Settings";
      this.panel.dataset.name = name;
      this.panel.setAttribute("aria-label", label);
      fill(this.panel, el("header.chat-panel-head", {}, el("h2", {}, label), el("button.icon-button.small", { type: "button", "aria-label": "Close", onclick: () => this.togglePanel(null) }, icon("close"))), name === "tree" ? this.panelTree.element : this.form.element);
      if (name === "tree") this.panelTree.draw();
      else this.showSettings();
      if (this.isNarrow) this.toggleSide(false);
      this.panel.querySelector("[tabindex='0'], input, textarea, select")?.focus();
    }
    this.shade.hidden = !(this.isNarrow && (open || !this.list.element.hidden));
  }

  closeDrawers() {
    const any = !this.panel.hidden || (this.isNarrow && !this.list.element.hidden);
    if (!any) return false;
    if (!this.panel.hidden) this.togglePanel(null);
    if (this.isNarrow) this.toggleSide(false);
    this.composer.focus();
    return true;
  }

  // -- beginning, opening -------------------------------------------------------------------

  async start() {
    this.timer = setInterval(() => document.visibilityState === "visible" && this.app.connection !== "lost" && this.library.refresh(), LOOK);
    const { id } = this.app.params;
    if (id && id === this.library.id && !this.library.isForeign) this.resume();
    else if (id) await this.open(id);
    else if (this.library.id && this.library.tree.size && !this.library.isForeign) this.resume();
    else this.begin({ quiet: true });
    await this.library.refresh().catch(() => {});
  }

  /** Show the conversation that went on while another view was shown. */
  resume() {
    const { at, beside } = this.app.params;
    this.composer.open(this.library.id);
    this.showAt(at, beside);
  }

  showAt(at, beside = null) {
    const leaf = at && this.tree.get(at) ? at : this.tree.leafBelow(null);
    if (beside && this.tree.get(beside)) this.openBeside(beside, { quiet: true });
    this.threads[0].go(leaf);
    // Several answers among which nobody has chosen yet.
    const answers = this.tree.children(leaf);
    if (at === leaf && answers.length > 1 && answers.every((node) => node.role === "assistant")) {
      this.threads[0].choices = answers.map((node) => node.id);
      this.threads[0].draw();
    }
    this.drawRest();
  }

  /** Begin a new conversation. */
  begin({ quiet = false } = {}) {
    this.closeBeside();
    this.library.begin(structuredClone(habits.get()));
    this.say(null);
    // What was typed for a conversation that has not begun waits under a name of its own.
    this.composer.open("new");
    this.threads[0].leaf = null;
    this.threads[0].choices = null;
    this.threads[0].draw();
    this.set({ id: null, at: null, beside: null }, { replace: quiet });
    this.drawRest();
    if (this.isNarrow && !this.list.element.hidden) this.toggleSide(false);
    if (!quiet || matchMedia("(pointer: fine)").matches) this.composer.focus();
  }

  async open(id) {
    this.closeBeside();
    this.say(null);
    const { at, beside } = this.app.params.id === id ? this.app.params : {};
    this.threads[0].leaf = at ?? null;
    this.threads[0].choices = null;
    try {
      await this.library.open(id);
    } catch (error) {
      if (this.app.isAbort(error)) return;
      this.begin({ quiet: true });
      if (error.code !== "unreachable") this.app.notify(error.status === 404 ? "This conversation is not there any more; another window may have deleted it" : error.message, "error");
      return;
    }
    this.set({ id, at: null, beside: null }, { replace: this.app.params.id === id });
    this.composer.open(id);
    this.showAt(at, beside);
    if (this.isNarrow && !this.list.element.hidden) this.toggleSide(false);
    // The browser's copy is shown while the server is asked: somebody may be at a message of it.
    const atMessage = this.threads[0].list.contains(document.activeElement);
    if (matchMedia("(pointer: fine)").matches && !atMessage) this.composer.focus();
  }

  /** Take over a document as a new conversation, and show the branch that ends with `leaf`. */
  async adopt(document, leaf = null) {
    this.begin();
    this.library.tree = new Tree(document);
    if (!Object.keys(this.tree.settings).length) this.tree.settings = structuredClone(habits.get());
    this.library.touch({ soon: 0 });
    this.set({ id: this.library.id });
    this.composer.open(this.library.id);
    this.showAt(leaf && this.tree.leafBelow(leaf));
    this.app.announce("Imported");
  }

  end() {
    clearInterval(this.timer);
    clearTimeout(this.counting);
    if (this.core.view === this) this.core.view = null;
    this.library.flush();
  }

  // -- what the core tells ------------------------------------------------------------------------

  /** A piece of an answer has come: draw it with the next picture. */
  changed(id) {
    this.drawnSoon.add(id);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      for (const one of this.drawnSoon) for (const thread of this.threads) thread.update(one);
      this.drawnSoon.clear();
      this.drawState();
    });
  }

  ended(id) {
    for (const thread of this.threads) thread.draw();
    this.drawRest();
    const node = this.tree.get(id);
    if (!node) return;
    const how = node.error ? `The answer failed: ${node.error.message}` : node.finish === "stopped" ? "Stopped" : `Answered with ${this.app.format.count(node.usage?.completion ?? 0, "token")}`;
    this.app.announce(how);
  }

  /** The tree was read again. */
  drawn() {
    for (const thread of this.threads) thread.draw();
    this.drawRest();
  }

  listed() {
    this.list.draw();
  }

  lost(reason) {
    const { el, visible } = this.app;
    if (reason === "deleted") {
      this.say(
        "Another window has deleted this conversation. It is still here: ",
        el("button.button.small", { type: "button", onclick: () => (this.say(null), this.library.revive()) }, "Keep it"),
        el("button.button.small", { type: "button", onclick: () => (chatCopies.drop(this.library.id), (this.library.dirty = false), this.begin()) }, "Close it"),
      );
    } else this.say(reason && `The conversation is kept in this browser only. The server: ${visible(reason, 400)}`);
  }

  say(...parts) {
    this.notice.hidden = parts[0] === null;
    this.app.fill(this.notice, parts);
  }

  // -- drawing around the threads --------------------------------------------------------------------

  drawRest() {
    const { fill, named, icon, el } = this.app;
    fill(this.titleButton, named(this.tree.title || "New chat"), el("span.sr-only", {}, ", rename"), icon("edit"));
    this.titleButton.disabled = !this.tree.size;
    this.list.draw();
    if (!this.panel.hidden && this.panel.dataset.name === "tree") this.panelTree.draw();
    this.drawState();
  }

  drawState() {
    const path = this.tree.path(this.threads[0].choices?.[0] ?? this.leaf);
    const last = path.at(-1);
    const known = last?.usage ? last.usage.prompt + last.usage.completion : last ? null : 0;
    if (known === null && !this.runs.busy && this.counted?.leaf !== this.leaf) this.countSoon();
    const counted = this.counted?.leaf === this.leaf && (known === null || this.composer.hasDraft) ? this.counted.tokens : null;
    const used = counted ?? known ?? path.findLast((node) => node.usage)?.usage.prompt ?? 0;
    this.composer.state({ running: this.runs.busy, used, about: counted !== null && this.composer.hasDraft, total: this.total, sides: this.threads.length });
  }

  /** Tokens of the model's context. */
  get total() {
    return this.app.overview?.model?.max_length ?? 0;
  }

  /** Count the tokens of the branch with what is being written, once nobody types. */
  countSoon() {
    clearTimeout(this.counting);
    // What the template refuses is told when it is sent.
    this.counting = setTimeout(() => this.count().catch((error) => error.status === 400 && (this.counted = { leaf: this.leaf, tokens: null, refused: true })), COUNT);
  }

  async count() {
    const { leaf, composer, app, tree } = this;
    const path = tree.path(leaf);
    const refused = this.counted?.leaf === leaf && this.counted.refused;
    if (!this.total || this.runs.busy || refused || app.connection === "lost" || app.signal.aborted) return undefined;
    if (!composer.hasDraft && (!path.length || path.at(-1).usage)) return this.drawState();
    const draft = composer.hasDraft ? [{ role: "user", content: composer.area.value, files: composer.files }] : [];
    const messages = messagesOf([...path, ...draft]);
    const size = messages.reduce((sum, one) => sum + one.content.length, 0);
    // A token of text seldom has more than 8 characters, and counting such a text takes long.
    const found = !messages.length || size > 16 * this.total ? { count: size ? Infinity : 0 } : await app.post("tokenize", { messages, add_generation_prompt: draft.length > 0 });
    this.counted = { leaf, tokens: found.count };
    if (leaf === this.leaf) this.drawState();
    return undefined;
  }

  welcome() {
    const { el, named, overview, icon } = this.app;
    const tips = [
      ["edit", "Edit any message: the conversation branches there, and nothing before it runs again."],
      ["left", "Arrows at a message go between its branches; the tree shows all of them."],
      ["compare", "Put two branches side by side, and ask both the same question."],
    ];
    this.welcomeBox ??= el("div.welcome");
    this.app.fill(
      this.welcomeBox,
      el("h2", {}, "What shall we talk about?"),
      el("p.hint", {}, overview ? ["With ", el("button.about", { type: "button", title: "About this model", onclick: () => import("./chat/about_model.js").then(({ aboutModel }) => aboutModel(this.app), this.app.fail) }, named(overview.model?.name ?? "the model"))] : "Connecting…"),
      el("ul.tips", {}, tips.map(([name, text]) => el("li", {}, icon(name), el("span", {}, text)))),
      this.composer.prompts.chips(),
    );
    return this.welcomeBox;
  }

  // -- asking ------------------------------------------------------------------------------------------

  /** Send a message to the branches that are shown. Returns whether it was taken. */
  ask(text, files, count) {
    if (this.runs.busy) {
      this.app.notify("An answer is under way. Your text is kept; send it when the answer has come, or stop it first.");
      return false;
    }
    for (const thread of this.threads) thread.ask(text, structuredClone(files), count);
    if (this.app.params.id !== this.library.id) {
      this.set({ id: this.library.id, at: null });
      this.composer.place = this.library.id;
      // The draft was typed before the conversation had an id.
      drafts.drop("new");
    }
    this.drawRest();
    return true;
  }

  stop() {
    if (!this.runs.busy) return false;
    this.runs.stopAll();
    return true;
  }

  /** Put the focus on the last message, unless something else is to be closed first. */
  leaveField() {
    if (!this.panel.hidden || (this.isNarrow && !this.list.element.hidden)) return false;
    const { list, scroller } = this.threads[0];
    ([...list.querySelectorAll("article.message")].at(-1) ?? scroller).focus({ preventScroll: true });
    return true;
  }

  editLast() {
    const node = this.tree.path(this.leaf).findLast((one) => one.role === "user");
    if (!node) return false;
    this.threads[0].messages.get(node.id)?.edit();
    return true;
  }

  moved(at, leaf) {
    const name = at ? "beside" : "at";
    if (this.app.params.id === this.library.id) this.set({ [name]: leaf });
    this.drawRest();
  }

  /** Show a branch, with the focus on one of its messages. */
  show(leaf, focus = null) {
    this.threads[0].follows = false;
    this.threads[0].go(leaf);
    const message = this.threads[0].messages.get(focus)?.element;
    message?.scrollIntoView({ block: "center" });
    if (this.isNarrow) {
      this.togglePanel(null);
      message?.focus();
    }
  }

  /** Dim what a rewind would leave. */
  preview(id) {
    let behind = false;
    for (const element of this.threads[0].list.querySelectorAll("article.message")) {
      element.classList.toggle("leaving", behind);
      if (id && element.dataset.id === id) behind = true;
    }
  }

  // -- two branches ---------------------------------------------------------------------------------------

  openBeside(leaf, { quiet = false } = {}) {
    if (!this.threads[1]) this.threads[1] = this.makeThread(1, leaf);
    this.arrange();
    this.threads[1].go(leaf);
    if (this.isNarrow) this.togglePanel(null);
    if (!quiet) this.app.announce("Two branches are shown; a message goes to both");
  }

  closeBeside() {
    if (!this.threads[1]) return;
    this.threads.length = 1;
    this.arrange();
    this.set({ beside: null });
    this.drawRest();
  }

  // -- settings -----------------------------------------------------------------------------------------------

  showSettings() {
    const root = this.tree.path(this.leaf)[0];
    const system = this.leaf === null ? (this.tree.settings.system ?? "") : root?.role === "system" ? root.content : "";
    this.form.show(this.tree.settings, { system });
  }

  settled(settings, name) {
    const { tree } = this;
    tree.settings = structuredClone(settings);
    tree.settled = Date.now();
    habits.put(settings);
    if (name === "system" && this.leaf !== null) this.otherSystem(settings.system?.trim() ?? "");
    if (tree.size) this.library.touch();
  }

  /** Put the branch behind another system message. */
  otherSystem(text) {
    const { tree } = this;
    const path = tree.path(this.leaf);
    const old = path[0].role === "system" ? path[0] : null;
    if ((old?.content ?? "") === text) return;
    const made = text ? tree.add(null, { role: "system", content: text }).id : null;
    const leaf = tree.copyBelow(old?.id ?? null, this.leaf, made);
    this.threads[0].go(leaf ?? made);
    this.app.notify("The branch goes on behind the new system message; the one before stays beside it");
  }

  // -- menus -------------------------------------------------------------------------------------------------------

  menuOf(title, anchor, items) {
    const { openDialog, el, icon } = this.app;
    const rows = items.filter(Boolean);
    const item = (close) => ([name, text, does, hint, disabled], at) =>
      el("button.menu-item", { type: "button", disabled: Boolean(disabled), autofocus: at === 0, onclick: () => (close(), this.attempt(does)) }, icon(name), el("span", {}, text), hint ? el("span.hint", {}, hint) : null);
    const body = (close) => {
      const box = el("div.dialog-body.menu-body", {}, rows.map(item(close)));
      const step = (by) => {
        const all = [...box.querySelectorAll("button:not(:disabled)")];
        all[(all.indexOf(document.activeElement) + by + all.length) % all.length]?.focus();
      };
      this.app.keys(box, { ArrowDown: () => step(1), ArrowUp: () => step(-1) });
      return box;
    };
    return openDialog(title, body, { class: "menu", anchor });
  }

  /** Do something, and tell what went wrong. */
  async attempt(work) {
    try {
      await work();
    } catch (error) {
      this.app.fail(error);
    }
    this.drawn();
  }

  messageMenu(thread, id, anchor) {
    const { tree, held } = this;
    const node = tree.get(id);
    const can = this.app.overview?.allow_edits === true;
    const closed = can ? "" : "needs --allow-edits";
    const siblings = tree.siblings(id);
    const other = siblings.find((one) => one.id !== id);
    return this.menuOf("Message", anchor, [
      ["rewind", "Go back to here", () => thread.rewind(id), "B"],
      other ? ["compare", "Compare with the branch beside", () => this.openBeside(tree.leafBelow(other.id))] : null,
      node.role === "assistant" ? ["again", "Three more answers", () => thread.answer(node.parent, 3)] : null,
      ["tag", node.name ? "Rename the branch" : "Name the branch", () => this.nameBranch(id)],
      node.role === "assistant" ? ["token", thread.messages.get(id).asWritten ? "Show as Markdown" : "Show as it was written", () => thread.messages.get(id).turnWritten()] : null,
      ["pin", node.pin ? "Unpin" : "Pin its state", () => held.pin(id), closed, !can],
      ["commit", "Commit…", () => held.commit(id), closed, !can],
      ["download", "Save the state file", () => this.exchange.state(id), closed, !can],
      ["token", "Chances and attention", () => held.look(id, "token", {}), closed, !can],
      ["pages", "Its pages", () => held.look(id, "pages", {}), closed, !can],
      ["trash", "Delete from here on", () => this.removeBranch(id)],
    ]);
  }

  look(id, view, params) {
    return this.attempt(() => this.held.look(id, view, params));
  }

  exportMenu(anchor) {
    const { exchange } = this;
    const none = this.leaf === null;
    const can = this.app.overview?.allow_edits === true;
    return this.menuOf("Export and import", anchor, [
      ["download", "Branch as Markdown", () => exchange.markdown(), "", none],
      ["download", "Branch as messages (JSON)", () => exchange.messages(), "", none],
      ["download", "All branches (JSON)", () => exchange.all(), "", none],
      ["save", "Branch as a state file", () => exchange.state(this.leaf), can ? "" : "needs --allow-edits", none || !can],
      ["download", "All conversations (JSON)", () => exchange.everything(), "", !this.library.list.length],
      ["upload", "Import a file…", () => exchange.choose()],
    ]);
  }

  chatMenu(one, anchor) {
    return this.menuOf(one.title || "Conversation", anchor, [
      ["edit", "Rename", async () => (await this.opened(one.id), this.rename())],
      ["pin", one.pinned ? "Unpin from the top" : "Pin to the top", () => this.pinChat(one)],
      ["trash", "Delete", () => this.removeChat(one)],
    ]);
  }

  async opened(id) {
    if (id !== this.library.id) await this.open(id);
  }

  async pinChat({ id, pinned }) {
    await this.opened(id);
    [this.tree.pinned, this.tree.pinnedAt] = [!pinned, Date.now()];
    this.library.touch({ soon: 0 });
  }

  async removeChat(one) {
    if (!(await this.app.confirmed("Delete the conversation", `“${this.app.visible(one.title || "Untitled", 80)}” and all its branches are deleted, here and in other windows.`, "Delete"))) return;
    const own = one.id === this.library.id;
    if (own) this.runs.stopAll();
    await this.library.remove(one.id);
    if (own) this.begin();
    void this.held.releaseAll(one.id);
  }

  async rename() {
    if (!this.tree.size) return;
    const given = await this.app.ask("Rename", [{ name: "title", label: "Title", value: this.tree.title, required: true }], { action: "Rename" });
    if (!given) return;
    [this.tree.title, this.tree.titled] = [given.title.slice(0, 200), Date.now()];
    this.library.touch({ soon: 0 });
    this.drawRest();
  }

  async nameBranch(id) {
    const given = await this.app.ask("Name the branch", [{ name: "name", label: "Name", value: this.tree.get(id).name ?? "", hint: "Empty: no name." }], { action: "Name" });
    if (!given) return;
    this.tree.patch(id, { name: given.name.trim().slice(0, 100) || undefined });
    this.library.touch();
  }

  async removeBranch(id) {
    const count = (node) => 1 + this.tree.children(node).reduce((sum, child) => sum + count(child.id), 0);
    const many = count(id);
    if (many > 1 && !(await this.app.confirmed("Delete from here on", `${this.app.format.count(many, "message")} are deleted. Branches beside stay.`, "Delete"))) return;
    const parent = this.tree.get(id).parent;
    const gone = this.tree.remove(id);
    for (const node of gone) this.runs.stop(node.id);
    this.held.release(gone);
    this.library.touch();
    for (const thread of this.threads) if (!this.tree.get(thread.leaf)) thread.go(this.tree.leafBelow(parent));
    this.drawn();
  }

  // -- what the server tells ----------------------------------------------------------------------------------------

  async update(change) {
    if (change.kind === "overview") {
      if (this.leaf === null && !this.threads[0].choices) this.threads[0].draw();
      this.drawState();
    } else if (change.kind === "params") {
      const { id, at } = this.app.params;
      if (id && id !== this.library.id) await this.open(id);
      else if (!id && this.tree.size && this.library.id) this.begin({ quiet: true });
      else if (at && at !== this.leaf && this.tree.get(at)) this.threads[0].go(at);
    } else if (change.kind === "reconnected" || change.kind === "restart") {
      if (this.library.isForeign) {
        this.library.list = [];
        this.begin({ quiet: true });
      }
      await this.library.refresh();
      this.library.flush();
    }
  }
}
