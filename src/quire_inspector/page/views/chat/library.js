// Conversations on the server, /v1/chats: read, written by versions, merged where two windows have
// changed one, and kept in the browser while the server is away.

import { chatCopies, keyMark } from "./kept.js";
import { Tree, makeId } from "./tree.js";

/** Milliseconds from a change to its writing. */
const SOON = 600;

/** Return what is sent of a conversation's document that was read as a version; 0: it is new. */
const bodyOf = (document, version) => ({ title: (document.title ?? "").slice(0, 256), pinned: document.pinned === true, document, version });
const byTime = (a, b) => b.updated - a.updated;

export class Library {
  /** @param {object} app @param {{changed: () => void, listed: () => void, lost: (reason: string | null) => void}} hear */
  constructor(app, hear) {
    this.app = app;
    this.hear = hear;
    /** Summaries, the latest first. */
    this.list = [];
    this.id = null;
    /** Whose it is. */
    this.key = keyMark();
    this.tree = new Tree();
    this.version = 0;
    /** The process of the server that has this version. */
    this.knownTo = null;
    this.dirty = false;
    /** Why the conversation cannot be written, to be said once. */
    this.trouble = null;
    /** The write under way, which ends without an error, and whose it is. */
    this.writing = this.writes = null;
    /** The tree of a conversation in which an answer is under way. */
    this.treeOf = (_id) => null;
    // Other windows of this browser hear of a change at once, and those of other browsers when they look.
    this.windows = new BroadcastChannel("quire.chats");
    this.windows.onmessage = () => void this.refresh();
  }

  /** Which process of the server this is: without a state directory, another one knows nothing. */
  get started() {
    return this.app.overview?.started ?? null;
  }

  // -- which one --------------------------------------------------------------------

  /** Begin a conversation, which is written with its first message. */
  begin(settings) {
    this.flush();
    this.id = `chat-${makeId(16)}`;
    this.key = keyMark();
    this.tree = new Tree({ settings });
    [this.version, this.dirty, this.trouble] = [0, false, null];
  }

  /** Open a conversation: the browser's copy at once, and the server's when it is there. */
  async open(id) {
    this.flush();
    const copy = chatCopies.get(id);
    this.id = id;
    this.key = keyMark();
    this.tree = this.treeOf(id) ?? new Tree(copy?.document);
    this.version = copy?.version ?? 0;
    this.dirty = copy?.dirty ?? false;
    this.trouble = null;
    this.knownTo = copy?.started ?? null;
    if (copy) this.hear.changed();
    if (copy && !copy.version) {
      // It was not written yet.
      this.writeSoon(0);
      return true;
    }
    try {
      await this.pull();
      return true;
    } catch (error) {
      if (this.app.isAbort(error)) throw error;
      if (copy && error.status === 404) {
        // The server may have forgotten it, or another window may have deleted it.
        if (copy.dirty || copy.started !== this.started) this.revive();
        else this.hear.lost("deleted");
        return true;
      }
      if (copy) return true;
      throw error;
    }
  }

  /** Read the server's version, and take over what is new in it. */
  async pull() {
    const { id } = this;
    const found = await this.app.get(`v1/chats/${id}`);
    if (id !== this.id) return;
    const before = this.version;
    [this.version, this.knownTo] = [found.version, this.started];
    const changed = this.tree.merge(found.document);
    this.keepCopy();
    if (this.dirty) this.writeSoon();
    if (changed || before === 0) this.hear.changed();
  }

  /** Write a conversation that the server does not have as a new one. */
  revive() {
    this.version = 0;
    this.dirty = true;
    this.writeSoon(0);
  }

  // -- writing -------------------------------------------------------------------------

  /** Note a change: kept in the browser at once, on the server soon. */
  touch({ soon = SOON } = {}) {
    this.dirty = true;
    this.keepCopy();
    this.writeSoon(soon);
  }

  /** Keep a copy only, as while an answer grows. */
  keepCopy() {
    if (!this.tree.size || this.isForeign) return;
    const { id, version, started, dirty } = this;
    chatCopies.put({ id, version, started, dirty, updated: Date.now() / 1000, document: this.tree.document() });
  }

  writeSoon(soon = SOON) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), soon);
  }

  /** Whether the conversation is of another API key than the present one. */
  get isForeign() {
    return this.key !== keyMark();
  }

  flush() {
    clearTimeout(this.timer);
    if (!this.dirty || !this.id || this.isForeign) return;
    const { id, tree } = this;
    if (this.writing) void this.writing.then(() => (id === this.id ? this.write() : this.keepOther(id, tree)));
    else void this.write();
  }

  async write() {
    if (!this.dirty || !this.tree.size || this.isForeign) return;
    if (this.writing) return void this.writing.then(() => this.id && this.writeSoon());
    const { id, tree, version } = this;
    this.dirty = false;
    this.writes = id;
    this.writing = this.send(id, bodyOf(tree.document(), version)).finally(() => (this.writing = this.writes = null));
    await this.writing;
  }

  async send(id, body) {
    try {
      const done = await this.app.put(`v1/chats/${id}`, body);
      this.noteListed(done);
      this.windows.postMessage(id);
      if (id !== this.id) {
        const copy = chatCopies.get(id);
        if (copy) chatCopies.put({ ...copy, version: done.version, started: this.started, dirty: false });
        return;
      }
      [this.version, this.knownTo] = [done.version, this.started];
      if (this.trouble) this.hear.lost((this.trouble = null));
      this.keepCopy();
    } catch (error) {
      if (id === this.id) this.dirty = true;
      await this.refused(id, error);
    }
  }

  async refused(id, error) {
    if (this.app.isAbort(error) || id !== this.id || error.code === "unreachable" || error.status === 401) return;
    if (error.code === "chat_changed") return void (await this.pull().catch(() => {}));
    if (error.status === 404) return this.hear.lost("deleted");
    if (this.trouble !== error.message) {
      this.trouble = error.message;
      this.hear.lost(error.message);
    }
    return undefined;
  }

  /** Write a conversation that is not shown: it has changed since the last writing. */
  async keepOther(id, tree) {
    try {
      const found = await this.app.get(`v1/chats/${id}`);
      tree.merge(found.document);
      this.noteListed(await this.app.put(`v1/chats/${id}`, bodyOf(tree.document(), found.version)));
    } catch {
      const copy = chatCopies.get(id);
      if (copy) chatCopies.put({ ...copy, document: tree.document(), dirty: true });
    }
  }

  /** Write a new conversation that is not shown. */
  async addOther(document) {
    this.noteListed(await this.app.put(`v1/chats/chat-${makeId(16)}`, bodyOf(document, 0)));
  }

  /** Return the conversations that have all words: of the server, or of this browser while it is away. */
  async search(words) {
    try {
      return (await this.app.get("v1/chats", { search: words.slice(0, 200) })).data;
    } catch (error) {
      if (this.app.isAbort(error)) return [];
      const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
      return this.list.filter((one) => wanted.every((word) => one.title.toLowerCase().includes(word)));
    }
  }

  /** Return the documents of all conversations, the latest first. */
  async everything() {
    await this.write();
    const found = [];
    for (const { id } of this.list) found.push(id === this.id ? this.tree.document() : (await this.app.get(`v1/chats/${id}`)).document);
    return found;
  }

  // -- the list -------------------------------------------------------------------------

  noteListed(summary) {
    this.list = [summary, ...this.list.filter((one) => one.id !== summary.id)].sort(byTime);
    this.hear.listed();
  }

  /** Read the list, and the conversation again if another window has changed it. */
  async refresh() {
    let found;
    try {
      found = (await this.app.get("v1/chats")).data;
    } catch (error) {
      if (this.app.isAbort(error)) return;
      found = null;
    }
    if (found) {
      const known = new Set(found.map((one) => one.id));
      for (const copy of chatCopies.all()) {
        if (known.has(copy.id)) continue;
        if (copy.id === this.id || copy.id === this.writes) continue;
        if (copy.dirty || copy.started !== this.started) this.sendAgain(copy);
        else chatCopies.drop(copy.id);
      }
      this.list = found;
      const own = found.find((one) => one.id === this.id);
      if (!own && this.version && !this.writing) {
        // Another process of the server has not got it; the same one has deleted it for another window.
        if (this.knownTo !== this.started) this.revive();
        else this.hear.lost("deleted");
      }
      if (own && own.version > this.version && !this.writing) await this.pull().catch(() => {});
      if (this.dirty && (own || !this.version)) this.writeSoon();
    } else if (!this.list.length) {
      this.list = chatCopies.all().map((one) => ({ id: one.id, title: one.document.title ?? "", updated: one.updated ?? 0, version: one.version, pinned: one.document.pinned === true }));
      this.list.sort(byTime);
    }
    this.hear.listed();
  }

  /** Send a conversation that only the browser has. */
  sendAgain(copy) {
    this.app.put(`v1/chats/${copy.id}`, bodyOf(copy.document, 0)).then(
      (done) => {
        chatCopies.put({ ...copy, version: done.version, started: this.started, dirty: false });
        this.noteListed(done);
      },
      () => {},
    );
  }

  /** Delete a conversation here and on the server. */
  async remove(id) {
    if (id === this.id) {
      clearTimeout(this.timer);
      this.dirty = false;
    }
    if (id === this.writes) await this.writing;
    try {
      await this.app.del(`v1/chats/${id}`);
    } catch (error) {
      if (error.status !== 404) throw error;
    }
    this.windows.postMessage(id);
    chatCopies.drop(id);
    this.list = this.list.filter((one) => one.id !== id);
    this.hear.listed();
    if (this.dirty) this.writeSoon(0);
  }
}
