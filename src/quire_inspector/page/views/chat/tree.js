// A conversation: messages as a tree. Each message is a place to branch; a path from the root to a
// message is what the model reads. Nothing here knows the page or the server.
//
// A node: {id, parent, role, content, created, changed}, and where it applies
//   files: [{name, text}]       attached to a user's message
//   reasoning, calls            of an answer: its thoughts; its tool calls as OpenAI has them
//   callId, tool                of a tool's result
//   finish, error, usage, quire, seconds, model   of an answer: why it ended, and what the server reported
//   session: {id, tokens}       a session of the server that holds the path up to here
//   commit: {name, id}, pin: id of a pinned session, name, copied, edited

export const FORMAT = 1;

/** Return an id: 12 hexadecimal digits unless told otherwise. */
export function makeId(bytes = 6) {
  return [...crypto.getRandomValues(new Uint8Array(bytes))].map((one) => one.toString(16).padStart(2, "0")).join("");
}

export class Tree {
  /** @param {object} [document] as `document()` gives it */
  constructor(document = {}) {
    this.nodes = new Map(Object.entries(document.nodes ?? {}));
    this.title = document.title ?? "";
    this.titled = document.titled ?? 0;
    /** Whether the list has it before the others, and since when. */
    this.pinned = document.pinned ?? false;
    this.pinnedAt = document.pinnedAt ?? 0;
    this.settings = document.settings ?? {};
    this.settled = document.settled ?? 0;
    /** The leaf that was last shown below each message, so that going back to a branch finds its end. */
    this.visited = new Map();
  }

  document() {
    const { title, titled, pinned, pinnedAt, settings, settled } = this;
    return { format: FORMAT, title, titled, pinned, pinnedAt, settings, settled, nodes: Object.fromEntries(this.nodes) };
  }

  get size() {
    return [...this.nodes.values()].filter((node) => !node.removed).length;
  }

  get(id) {
    const node = this.nodes.get(id);
    return node && !node.removed ? node : null;
  }

  /** Return what follows a message (null: what conversations begin with), the oldest first. */
  children(id) {
    const found = [...this.nodes.values()].filter((node) => !node.removed && node.parent === (id ?? null));
    return found.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
  }

  /** Return the alternatives of a message, itself among them. */
  siblings(id) {
    return this.children(this.get(id)?.parent ?? null);
  }

  /** Return the messages from the first to this one. */
  path(id) {
    const found = [];
    for (let node = this.get(id); node; node = this.get(node.parent)) {
      found.unshift(node);
      if (found.length > this.nodes.size) break;
    }
    return found;
  }

  /** Return the end of the branch through a message: the one that was shown last, else the newest. */
  leafBelow(id) {
    const seen = this.visited.get(id ?? "");
    if (seen && this.get(seen)) return seen;
    let at = id ?? null;
    for (let next = this.children(at).at(-1); next; next = this.children(at).at(-1)) at = next.id;
    return at;
  }

  /** Remember that a branch is shown up to here. */
  visit(id) {
    for (const node of this.path(id)) this.visited.set(node.id, id);
    this.visited.set("", id);
  }

  add(parent, fields) {
    const now = Date.now();
    // Later than all others, whatever the clock says, so that alternatives have an order.
    const last = Math.max(0, ...this.children(parent).map((node) => node.created));
    const node = { id: makeId(), parent: parent ?? null, content: "", created: Math.max(now, last + 1), changed: now, ...fields };
    this.nodes.set(node.id, node);
    return node;
  }

  patch(id, fields) {
    const node = this.nodes.get(id);
    if (!node) return null;
    Object.assign(node, fields, { changed: Math.max(Date.now(), node.changed + 1) });
    return node;
  }

  /** Remove a message and all that follows it. Returns the removed nodes. */
  remove(id) {
    const found = [];
    const walk = (one) => {
      found.push({ ...this.nodes.get(one) });
      for (const child of this.children(one)) walk(child.id);
    };
    if (!this.get(id)) return found;
    walk(id);
    for (const node of found) {
      // A mark stays, so that another window's copy does not bring it back.
      this.nodes.set(node.id, { id: node.id, parent: node.parent, created: node.created, changed: Date.now(), removed: true });
    }
    return found;
  }

  /** Copy the messages behind `from` (null: all) down to `leaf` behind `parent`. Returns the last copy's id. */
  copyBelow(from, leaf, parent) {
    const path = this.path(leaf);
    const start = from === null ? 0 : path.findIndex((node) => node.id === from) + 1;
    let at = parent;
    for (const node of path.slice(start)) {
      const { id: _id, parent: _parent, session: _session, commit: _commit, pin: _pin, quire: _quire, seconds: _seconds, usage: _usage, name: _name, ...kept } = node;
      at = this.add(at, { ...kept, created: Date.now(), changed: Date.now(), copied: true }).id;
    }
    return at;
  }

  /** Take over what another copy of the conversation has: of each message the later state. Returns whether something changed here. */
  merge(document) {
    const fresh = !this.nodes.size;
    let changed = false;
    for (const [id, node] of Object.entries(document.nodes ?? {})) {
      const own = this.nodes.get(id);
      if (own && (own.removed || (own.changed >= node.changed && !node.removed))) continue;
      this.nodes.set(id, node);
      changed = true;
    }
    if (fresh || (document.titled ?? 0) > this.titled) {
      [this.title, this.titled, changed] = [document.title ?? "", document.titled ?? 0, true];
    }
    if (fresh || (document.pinnedAt ?? 0) > this.pinnedAt) {
      [this.pinned, this.pinnedAt, changed] = [document.pinned ?? false, document.pinnedAt ?? 0, true];
    }
    if (fresh || (document.settled ?? 0) > this.settled) {
      [this.settings, this.settled, changed] = [document.settings ?? {}, document.settled ?? 0, true];
    }
    return changed;
  }
}

/** Return a user's message as the model reads it: its text, then its files. */
export function fullText(node) {
  const files = (node.files ?? []).map(({ name, text }) => `\n\nFile ${name}:\n${fenced(text)}`);
  return `${node.content}${files.join("")}`.trim();
}

function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** Return messages for the server. */
export function messagesOf(path) {
  return path
    .filter((node) => !(node.role === "assistant" && node.error && !node.content && !node.calls?.length))
    .map((node) => {
      if (node.role === "user") return { role: "user", content: fullText(node) };
      if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, name: node.tool, content: node.content };
      const message = { role: node.role, content: node.content };
      if (node.reasoning) message.reasoning_content = node.reasoning;
      if (node.calls?.length) message.tool_calls = node.calls;
      return message;
    });
}

/** Return a title for a conversation: the beginning of its first question. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 57)}…` : line;
}
