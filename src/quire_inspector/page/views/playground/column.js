// One branch of the Playground: its tokens, what runs in it, and its verbs.

import { sessionPath, tokensOf } from "../../lib/edits.js";
import { TokenStrip } from "../../lib/tokens.js";
import { branchNamed, endsWith, nextName, pause } from "./parts.js";
import { openTokenMenu } from "./token_menu.js";

/** Tokens at the end that are shown at first, and are added by "Earlier". */
const WINDOW = 1500;
/** Milliseconds between two questions whether a session is free again. */
const AGAIN = 150;
const TRIES = 20;

export class Column {
  /**
   * @param {object} app @param {string} id the session's id
   * @param {{sampling: () => object, mode: () => string, open: (id: string, after: Column) => Promise<Column>,
   *   close: (column: Column) => void, replace: (column: Column, id: string) => void, changed: () => void, names: () => Set<string>, branches: () => string[]|null}} actions
   */
  constructor(app, id, actions) {
    this.app = app;
    this.id = id;
    this.actions = actions;
    this.info = null;
    this.running = null;
    this.chances = new Map();
    this.start = 0;
    const { el, icon } = app;
    const button = (name, label, onclick, props = {}) => el("button.icon-button.small", { type: "button", "aria-label": label, title: label, onclick, ...props }, icon(name));
    this.strip = new TokenStrip({
      label: "Tokens; Enter tells what can be done at one",
      pick: (token, node) => this.running || this.gone || openTokenMenu(app, this, token, node),
      keys: { F: ({ position }) => this.fork(position + 1), R: ({ position }) => this.rewind(position + 1) },
      decorate: (node, token) => this.shade(node, token),
    });
    this.heading = el("h2", { tabindex: "-1" });
    this.facts = el("p.hint.column-facts");
    this.earlier = el("button.button.small", { type: "button", hidden: true, onclick: () => this.showEarlier() }, "Earlier tokens");
    this.note = el("p.column-note", { role: "status" });
    this.text = el("textarea.textarea", { rows: 2, "aria-label": "Text to add before the model goes on", spellcheck: "false" });
    this.runButton = el("button.button.primary", { type: "button", onclick: () => this.run() }, icon("play"), "Run");
    this.stopButton = el("button.button.danger", { type: "button", hidden: true, onclick: () => this.stop() }, icon("stop"), "Stop");
    this.commitButton = button("save", "Commit to a branch", () => this.commit());
    this.edits = [button("fork", "Fork", () => this.fork(this.length)), this.commitButton, button("trash", "Delete the session", () => this.remove())];
    this.element = el(
      "section.column",
      { dataset: { session: id } },
      el("header.column-head", {}, el("div.column-title", {}, this.heading, this.facts), el("div.column-tools", {}, this.edits, button("close", "Take out of the Playground", () => actions.close(this)))),
      el("div.column-text", {}, this.earlier, this.strip.element),
      this.note,
      el("div.composer", {}, this.text, el("div.composer-buttons", {}, this.runButton, this.stopButton)),
    );
    app.keys(this.element, { "Control+Enter": () => this.run(), Escape: () => (this.running ? this.stop() : false) });
    this.strip.element.classList.add("column-tokens");
    this.describe();
  }

  get length() {
    return this.info?.num_tokens ?? this.strip.tokens.length;
  }

  get gone() {
    return this.element.classList.contains("gone");
  }

  /** Ids of the tokens from position 0 on; null if not all are shown. */
  get ids() {
    return this.start === 0 ? this.strip.tokens.map((token) => token.id) : null;
  }

  // -- what is shown -------------------------------------------------------------

  /** Read the session anew, if it differs from what is shown. */
  async refresh({ force = false, tail = [] } = {}) {
    if (this.running) return;
    try {
      const info = await this.app.get(sessionPath(this.id), { tokens: false });
      if (this.running) return;
      const same = this.info !== null && !force && this.info.num_tokens === info.num_tokens && !this.info.in_use;
      this.info = info;
      this.element.classList.remove("gone");
      this.describe();
      if (!same) await this.loadTokens(tail);
    } catch (error) {
      if (error.status !== 404) throw error;
      this.lost();
    }
  }

  /** `tail`: ids that it ends with, or with all but the last of. */
  async loadTokens(tail = []) {
    const { num_tokens: length } = this.info;
    this.start = Math.max(0, length - WINDOW);
    let tokens = [];
    for (let tries = 0; tries < TRIES; tries++) {
      tokens = await tokensOf(this.app, `session:${this.id}`, this.start, length);
      if (this.running || this.app.signal.aborted) return;
      // Many viewers share one reading of the state, which may be a moment old.
      if (tokens.length === length - this.start && endsWith(tokens, tail) !== null) break;
      await pause(AGAIN);
    }
    const at = this.strip.index;
    this.strip.set(tokens);
    if (at >= 0 && at < tokens.length) this.strip.go(at, { quiet: true });
    this.earlier.hidden = this.start === 0;
    this.scrollDown();
    this.actions.changed();
  }

  async showEarlier() {
    this.start = Math.max(0, this.start - WINDOW) || 0;
    if (!this.start) this.start = 0;
    const tokens = await tokensOf(this.app, `session:${this.id}`, this.start, this.length).catch(this.app.fail);
    if (!tokens) return;
    this.strip.set(tokens);
    this.earlier.hidden = this.start === 0;
    this.actions.changed();
  }

  describe() {
    const { el, icon, named, format, fill, visible } = this.app;
    const name = this.info?.name ?? this.id;
    fill(this.heading, icon("session", { class: "kind-session" }), named(name));
    this.element.setAttribute("aria-label", `Branch ${visible(name, 80)}, ${this.id.slice(-6)}`);
    const { info } = this;
    if (!info) return;
    const parts = [format.count(info.num_tokens, "token"), format.count(info.pages, "page")];
    if (info.shared_pages) parts.push(`${format.number(info.shared_pages)} shared`);
    if (info.adapter) parts.push(`adapter ${visible(info.adapter, 40)}`);
    if (info.in_use && !this.running) parts.push(`in use: ${visible(info.in_use, 20)}`);
    if (info.last_commit) parts.push(`commit ${visible(info.last_commit, 8)}`);
    fill(this.facts, el("span", {}, parts.join(" · ")));
    this.commitButton.hidden = this.actions.branches() === null;
  }

  /** Dim what another branch that is open has too. */
  common(count) {
    this.strip.nodes.forEach((node, index) => node.classList.toggle("common", this.start + index < count));
  }

  /** Underline a token the more the less probable it was. */
  shade(node, token) {
    const chance = this.chances.get(token.position);
    if (chance === undefined || chance.id !== token.id) return;
    const level = chance.logprob > -0.22 ? 0 : chance.logprob > -1.2 ? 1 : chance.logprob > -3 ? 2 : 3;
    if (level) node.classList.add(`unlikely-${level}`);
    node.title += `, ${this.app.format.share(Math.exp(chance.logprob))}`;
  }

  scrollDown() {
    const box = this.strip.element;
    box.scrollTop = box.scrollHeight;
  }

  say(text, kind = "") {
    this.note.textContent = text;
    this.note.className = `column-note ${kind}`;
  }

  /** The session is not there any more: what it held can be made again. */
  lost() {
    this.element.classList.add("gone");
    this.setRunning(null);
    const { el, fill } = this.app;
    const again = this.strip.tokens.length > 0 && el("button.button.small", { type: "button", onclick: () => this.restore() }, "Make it again from its tokens");
    fill(this.note, "This session is not there any more. ", again);
    this.note.className = "column-note error";
  }

  async restore() {
    const ids = this.ids;
    if (!ids) return this.say("Only its last tokens are known here, so it cannot be made again", "error");
    try {
      const body = { prompt: ids };
      if (this.info?.name) body.name = this.info.name;
      if (this.info?.adapter) body.model = this.info.adapter;
      const made = await this.app.post("v1/sessions", body);
      this.say("");
      this.actions.replace(this, made.id);
    } catch (error) {
      this.app.fail(error);
    }
    return undefined;
  }

  // -- running -----------------------------------------------------------------------

  /** Add the text, if there is any, and let the model go on. */
  async run() {
    if (this.running || this.gone) return;
    let body;
    try {
      body = { ...this.actions.sampling(), stream: true, logprobs: 0 };
    } catch (error) {
      this.say(error.message, "error");
      return;
    }
    const text = this.text.value;
    if (text && this.actions.mode() === "chat") body.messages = [{ role: "user", content: text }];
    else if (text) body.prompt = text;
    if (!text && !this.length) return void this.say("An empty branch needs a text first", "error");
    await this.generate(body);
  }

  /** Stream a generation into the strip. Whatever ends it, the tokens by then stay in the session. */
  async generate(body) {
    const stop = new AbortController();
    this.setRunning(stop);
    this.say("Running…");
    const ids = [];
    const chances = [];
    let finish = null;
    let failure = null;
    let next = this.length;
    if (body.prompt || body.messages) this.preview(this.text.value);
    try {
      for await (const { data } of this.app.stream(sessionPath(this.id, "generate"), body, { signal: stop.signal })) {
        if (data.error) throw new Error(data.error.message);
        if (this.text.value && (body.prompt || body.messages)) this.text.value = "";
        const [choice] = data.choices ?? [];
        if (!choice) continue;
        const { token_ids: found = [], logprobs } = choice;
        found.forEach((id, index) => {
          ids.push(id);
          chances.push(logprobs?.token_logprobs?.[index]);
          this.strip.push([{ position: next, id, text: logprobs?.tokens?.[index] ?? "" }]);
          next += 1;
        });
        finish = choice.finish_reason ?? finish;
        this.scrollDown();
      }
    } catch (error) {
      failure = error;
    }
    await this.settle();
    this.setRunning(null);
    if (this.app.signal.aborted) return;
    await this.refresh({ force: true, tail: ids }).catch(this.app.fail);
    this.keepChances(ids, chances);
    this.told(ids.length, finish, failure);
  }

  /** Show the text that is being added until its tokens are known. */
  preview(text) {
    this.strip.push([{ position: -1, id: -1, text }]);
    this.strip.nodes.at(-1).classList.add("preview");
    this.scrollDown();
  }

  /** Wait until the session is free, as a call that was stopped ends in its own time. From then on
   * its length is known: a fork may follow before its tokens have come. */
  async settle() {
    for (let tries = 0; tries < 40 && !this.app.signal.aborted; tries++) {
      try {
        const info = await this.app.get(sessionPath(this.id), { tokens: false });
        if (!info.in_use) {
          this.info = info;
          return;
        }
      } catch {
        return;
      }
      await pause(AGAIN);
    }
  }

  told(count, finish, failure) {
    const { format, isAbort, announce, visible } = this.app;
    if (this.gone) return;
    if (failure && !isAbort(failure)) {
      this.say(failure.message, "error");
      return;
    }
    const why = failure ? "stopped" : { length: "the limit of tokens is reached", stop: "the model stopped" }[finish] ?? finish ?? "done";
    this.say(`${format.count(count, "token")}; ${why}`);
    announce(`${visible(this.info?.name ?? "The branch", 60)}: ${format.count(count, "token")}, ${why}`);
  }

  /** Remember how probable the new tokens were: those at the end of the session. */
  keepChances(ids, chances) {
    const shown = this.strip.tokens;
    const from = endsWith(shown, ids);
    if (from === null) return;
    for (let index = from; index < shown.length; index++) {
      const logprob = chances[index - from];
      if (typeof logprob !== "number") continue;
      this.chances.set(shown[index].position, { id: shown[index].id, logprob });
      this.shade(this.strip.nodes[index], shown[index]);
    }
  }

  stop() {
    this.say("Stopping…");
    this.running?.abort();
  }

  setRunning(controller) {
    this.running = controller;
    const busy = controller !== null;
    this.element.classList.toggle("running", busy);
    this.element.setAttribute("aria-busy", String(busy));
    const focused = document.activeElement;
    this.runButton.hidden = busy;
    this.stopButton.hidden = !busy;
    if (busy && focused === this.runButton) this.stopButton.focus();
    if (!busy && focused === this.stopButton) this.runButton.focus();
    for (const one of this.edits) one.disabled = busy;
  }

  // -- verbs -----------------------------------------------------------------------------

  /** Do something with the session unless it runs, and tell what went wrong. */
  async edit(work) {
    if (this.running || this.gone) return undefined;
    try {
      return await work();
    } catch (error) {
      if (error.status === 404) this.lost();
      else if (!this.app.isAbort(error)) this.say(error.message, "error");
      return undefined;
    }
  }

  /** Fork the first `at` tokens into a column beside this one. */
  fork(at) {
    return this.edit(async () => {
      const { ids } = await this.app.post(sessionPath(this.id, "fork"), { at, ...this.childName() });
      const column = await this.actions.open(ids[0], this);
      for (const [position, chance] of this.chances) if (position < at) column.chances.set(position, chance);
      this.app.announce(`Forked at ${this.app.format.count(at, "token")}`);
      return column;
    });
  }

  /** Fork before a position, and go on with another token there. */
  forkWith(position, token) {
    return this.edit(async () => {
      const { ids } = await this.app.post(sessionPath(this.id, "fork"), { at: position, ...this.childName() });
      await this.app.post(sessionPath(ids[0], "append"), { tokens: [token.id] });
      const column = await this.actions.open(ids[0], this);
      await column.run();
    });
  }

  childName() {
    if (!this.info?.name) return {};
    const taken = this.actions.names();
    let name = this.info.name;
    do name = nextName(name);
    while (taken.has(name));
    return { name };
  }

  rewind(to) {
    return this.edit(async () => {
      const { replayed } = await this.app.post(sessionPath(this.id, "rewind"), { to });
      await this.refresh({ force: true });
      const again = replayed ? `; ${this.app.format.count(replayed, "token")} will be run again` : "";
      this.say(`Rewound to ${this.app.format.count(to, "token")}${again}`);
    });
  }

  commit() {
    return this.edit(async () => {
      const known = this.actions.branches() ?? [];
      const given = await this.app.ask(
        "Commit",
        [
          { name: "name", label: "Branch", value: this.branchName(known), required: true, hint: known.length ? `Known: ${this.app.visible(known.join(", "), 120)}.` : "" },
          { name: "message", label: "Message" },
        ],
        {
          action: "Commit",
          check: async ({ name, message }) => {
            await this.app.post(sessionPath(this.id, "commit"), { name, ...(message ? { message } : {}) });
          },
        },
      );
      if (!given) return;
      await this.refresh();
      this.say(`Committed to ${this.app.visible(given.name, 60)}`);
    });
  }

  /** The branch to propose: a known one if it may go on from there, else one that is free. */
  branchName(known) {
    const { last_commit: last, name } = this.info ?? {};
    if (last && known.length === 1) return known[0];
    return [branchNamed(name ?? ""), "main"].find((one) => one && !known.includes(one)) ?? "";
  }

  remove() {
    return this.edit(async () => {
      const name = this.app.visible(this.info?.name ?? this.id, 60);
      if (!(await this.app.confirmed("Delete the session", `${name} and its ${this.app.format.count(this.length, "token")} are given up. Forks of it stay.`, "Delete"))) return;
      await this.app.del(sessionPath(this.id));
      this.actions.close(this);
      this.app.announce(`${name} is deleted`);
    });
  }
}
