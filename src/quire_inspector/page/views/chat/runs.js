// Answers: asked of the server, streamed into the tree, stopped. Where the server lets the page change
// sessions, each answer is held by a session: a fork of the one that holds the messages before.

import { sessionPath } from "../../lib/edits.js";
import { requestFields, templateFields } from "./settings.js";
import { messagesOf } from "./tree.js";

/** Seconds of life of a conversation's sessions without use. */
const TTL = 30 * 86400;
/** Milliseconds between two copies of a growing answer in the browser. */
const COPY = 2000;
const STREAMED = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, return_progress: true };

export class Runs {
  /** @param {object} app @param {import("./library.js").Library} library @param {{changed: (id: string) => void, ended: (id: string) => void}} hear */
  constructor(app, library, hear) {
    this.app = app;
    this.library = library;
    this.hear = hear;
    /** Answers under way by their ids: {stop, tree, chat, progress}. They go on while another conversation is shown. */
    this.running = new Map();
    /** The last fork under way of each session. */
    this.forks = new Map();
    library.treeOf = (chat) => [...this.running.values()].find((one) => one.chat === chat)?.tree ?? null;
  }

  has(id) {
    return this.running.has(id);
  }

  /** Whether an answer of the shown conversation is under way. */
  get busy() {
    return [...this.running.values()].some((one) => one.tree === this.library.tree);
  }

  /** How far the prompt of an answer under way is, as {total, cache, processed}; null before it is told, and once it is read. */
  progress(id) {
    return this.running.get(id)?.progress ?? null;
  }

  stop(id) {
    this.running.get(id)?.stop.abort();
  }

  /** Stop all answers of the shown conversation. */
  stopAll() {
    for (const one of this.running.values()) if (one.tree === this.library.tree) one.stop.abort();
  }

  /** Run an answer, and keep it when it ends. */
  start(tree, node, work) {
    const stop = new AbortController();
    const chat = this.library.id;
    this.running.set(node.id, { stop, tree, chat, progress: null });
    work(stop).finally(() => {
      this.running.delete(node.id);
      if (tree.get(node.id)) tree.patch(node.id, { pending: undefined });
      if (tree === this.library.tree) this.library.touch();
      else void this.library.keepOther(chat, tree);
      this.hear.ended(node.id);
    });
  }

  /** Whether answers are to be held by sessions. */
  holds(settings) {
    return this.app.overview?.allow_edits === true && settings.hold !== false;
  }

  /**
   * Answer the branch that ends with a message, and return the answer's id at once.
   * @param {string} parent the message to be answered
   * @param {object} [changes] of the settings, for this answer only
   */
  answer(parent, changes = {}) {
    const { tree } = this.library;
    const settings = { ...tree.settings, ...changes };
    const node = tree.add(parent, { role: "assistant", pending: true });
    this.start(tree, node, (stop) => this.run(tree, node, settings, stop));
    this.library.touch();
    return node.id;
  }

  /** Go on with an answer that was cut. */
  proceed(id) {
    const { tree } = this.library;
    const node = tree.get(id);
    if (node.session) void this.release(node.session.id);
    tree.patch(id, { pending: true, error: undefined, session: undefined });
    this.start(tree, node, (stop) => this.goOn(tree, node, stop));
  }

  /** The prompt is the conversation and the beginning of the answer, which no chat request takes. */
  async goOn(tree, node, stop) {
    const { app } = this;
    const began = performance.now();
    const before = node.content;
    const got = { content: before, reasoning: node.reasoning ?? "", calls: [], usage: null, quire: null, first: null, last: null, finish: null };
    try {
      const { sampling = {} } = tree.settings;
      const signal = stop.signal;
      const messages = messagesOf(tree.path(node.parent));
      const { tokens } = await app.post("tokenize", { messages, add_generation_prompt: true }, { signal });
      const { count } = await app.post("tokenize", { prompt: before, add_special_tokens: false }, { signal });
      const left = (app.overview?.model?.max_length ?? 0) - tokens.length - count;
      if (left <= 0) throw Object.assign(new Error("The context is full"), { code: "context_length_exceeded", status: 400 });
      const body = { max_tokens: left, ...sampling, prompt: [{ tokens }, { text: before }], ...STREAMED };
      for await (const { data } of app.stream("v1/completions", body, { signal })) {
        if (data.error) throw Object.assign(new Error(data.error.message), { code: data.error.code, status: 200 });
        const choices = (data.choices ?? []).map((choice) => ({ delta: { content: choice.text }, finish_reason: choice.finish_reason }));
        this.take(got, { ...data, choices }, node.id);
        this.show(tree, node, got, began);
      }
      tree.patch(node.id, { finish: got.finish ?? "stop" });
    } catch (error) {
      if (app.isAbort(error)) tree.patch(node.id, { finish: "stopped" });
      else tree.patch(node.id, { finish: "error", error: { message: error.message, code: error.code ?? null, status: error.status ?? null } });
    }
  }

  async run(tree, node, settings, stop) {
    const { app } = this;
    const began = performance.now();
    const got = { content: "", reasoning: "", calls: [], usage: null, quire: null, first: null, last: null, finish: null };
    let held = null;
    try {
      const fields = requestFields(settings);
      let lastCopy = began;
      for (let tries = 0; ; tries++) {
        const asked = await this.ground(tree, node, settings, stop.signal, tries > 0);
        held = asked.session;
        try {
          const body = { ...fields, ...asked.body, ...STREAMED };
          for await (const { data } of app.stream("v1/chat/completions", body, { signal: stop.signal })) {
            if (data.error) throw Object.assign(new Error(data.error.message), { code: data.error.code, status: 200 });
            this.take(got, data, node.id);
            const now = performance.now();
            this.show(tree, node, got, began);
            if (now - lastCopy > COPY && tree === this.library.tree) {
              lastCopy = now;
              this.library.keepCopy();
            }
          }
          break;
        } catch (error) {
          // A session that held the beginning is gone: the whole history is sent instead.
          if (tries || held === null || got.first !== null || ![404, 409].includes(error.status)) throw error;
          await this.release(held);
          held = null;
        }
      }
      this.show(tree, node, got, began);
      tree.patch(node.id, { finish: got.finish ?? "stop", model: app.overview?.model?.name });
    } catch (error) {
      this.show(tree, node, got, began);
      if (app.isAbort(error)) tree.patch(node.id, { finish: "stopped" });
      else tree.patch(node.id, { finish: "error", error: { message: error.message, code: error.code ?? null, status: error.status ?? null } });
    }
    if (held) await this.settle(tree, node, held);
  }

  /** Take over a chunk of the stream. */
  take(got, data, id) {
    this.running.get(id).progress = data.prompt_progress ?? null;
    got.usage = data.usage ?? got.usage;
    got.quire = data.quire ?? got.quire;
    const [choice] = data.choices ?? [];
    if (!choice) return;
    const { delta = {}, finish_reason: finish } = choice;
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      got.last = performance.now();
      got.first ??= got.last;
    }
    got.content += delta.content ?? "";
    got.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) {
      const own = (got.calls[call.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      own.id ||= call.id ?? "";
      own.function.name ||= call.function?.name ?? "";
      own.function.arguments += call.function?.arguments ?? "";
    }
    got.finish = finish ?? got.finish;
  }

  /** Write what has come so far into the tree. */
  show(tree, node, got, began) {
    const fields = { content: got.content };
    if (got.reasoning) fields.reasoning = got.reasoning;
    if (got.calls.length) fields.calls = got.calls.filter(Boolean);
    if (got.usage) fields.usage = { prompt: got.usage.prompt_tokens, completion: got.usage.completion_tokens, cached: got.usage.prompt_tokens_details?.cached_tokens ?? 0 };
    if (got.quire) fields.quire = got.quire;
    if (got.first !== null) fields.seconds = { first: (got.first - began) / 1000, rest: (got.last - got.first) / 1000 };
    tree.patch(node.id, fields);
    this.hear.changed(node.id);
  }

  // -- sessions ----------------------------------------------------------------------

  /**
   * Return what a request sends: the whole history; or a session that holds its beginning, and the rest.
   * @returns {Promise<{body: object, session: string|null}>}
   */
  async ground(tree, node, settings, signal, whole = false) {
    const path = tree.path(node.parent);
    const all = messagesOf(path);
    if (!all.some((message) => message.role !== "system")) throw new Error("There is no message to answer. Write one first.");
    if (!this.holds(settings)) return { body: { messages: all }, session: null };
    const base = whole ? -1 : path.findLastIndex((one) => one.session && one.role === "assistant");
    try {
      if (base >= 0) {
        const { id, tokens } = path[base].session;
        const made = await this.fork(id, tokens, tree.title, path[base], signal);
        if (made) return { body: { session_id: made, messages: messagesOf(path.slice(base + 1)) }, session: made };
      }
      const made = await this.app.post("v1/sessions", this.named(tree.title), { signal });
      return { body: { session_id: made.id, messages: all }, session: made.id };
    } catch (error) {
      if (this.app.isAbort(error) || error.code === "unreachable") throw error;
      // Too many sessions, or none may be made: the prefix cache serves the branch too.
      return { body: { messages: all }, session: null };
    }
  }

  named(title) {
    return { ttl: TTL, ...(title ? { name: title.slice(0, 200) } : {}), labels: { chat: this.library.id } };
  }

  /** Fork a session where a message ends; null if it is gone and no commit keeps it. One call at a time uses a session. */
  fork(id, ...given) {
    const before = this.forks.get(id) ?? Promise.resolve();
    const made = before.catch(() => {}).then(() => this.forkNow(id, ...given));
    this.forks.set(id, made);
    const forget = () => this.forks.get(id) === made && this.forks.delete(id);
    made.then(forget, forget);
    return made;
  }

  async forkNow(id, tokens, title, node, signal) {
    const body = { at: tokens, ttl: TTL, ...(title ? { name: title.slice(0, 200) } : {}) };
    try {
      return (await this.app.post(sessionPath(id, "fork"), body, { signal })).ids[0];
    } catch (error) {
      if (![404, 409].includes(error.status)) throw error;
      if (!node?.commit || error.status === 409) return null;
      const made = await this.app.post("v1/sessions/checkout", { branch: node.commit.id, ttl: TTL, labels: { chat: this.library.id } }, { signal });
      this.library.tree.patch(node.id, { session: { id: made.id, tokens: made.num_tokens } });
      return (await this.app.post(sessionPath(made.id, "fork"), { ...body, at: made.num_tokens }, { signal })).ids[0];
    }
  }

  /** Note where in its session an answer ends, once the session is free. */
  async settle(tree, node, id) {
    for (let tries = 0; tries < 40; tries++) {
      try {
        const found = await this.app.get(sessionPath(id), { tokens: false });
        if (found.in_use === null) {
          const made = tree.get(node.id);
          if (made?.content || made?.calls?.length) tree.patch(node.id, { session: { id, tokens: found.num_tokens, exact: found.exact } });
          else await this.release(id);
          return;
        }
      } catch {
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  }

  /** Delete a session that nothing needs any more. */
  async release(id) {
    await this.app.del(sessionPath(id)).catch(() => {});
  }

  /** Append answers to a new session. Returns its number of tokens. A call of a tool is written by the template only, in the next turn. */
  async said(made, answers) {
    const text = answers.map((one) => one.content).join("");
    return text ? (await this.app.post(sessionPath(made.id, "append"), { text })).num_tokens : made.num_tokens;
  }

  /**
   * Return a session that holds the path up to an answer: its own, or one that is made now.
   * @returns {Promise<{id: string, tokens: number}>}
   */
  async sessionOf(id) {
    const { tree } = this.library;
    const node = tree.get(id);
    if (node.session) {
      try {
        const found = await this.app.get(sessionPath(node.session.id), { tokens: false });
        return { id: node.session.id, tokens: node.session.tokens, all: found.num_tokens };
      } catch (error) {
        if (error.status !== 404) throw error;
      }
    }
    const path = tree.path(id);
    const question = path.findLastIndex((one) => one.role !== "assistant");
    const made = await this.app.post("v1/sessions", { ...this.named(tree.title), ...templateFields(tree.settings), messages: messagesOf(path.slice(0, question + 1)) });
    const tokens = await this.said(made, path.slice(question + 1));
    if (node.role === "assistant") tree.patch(id, { session: { id: made.id, tokens } });
    this.library.touch();
    return { id: made.id, tokens, all: tokens, made: true };
  }
}
