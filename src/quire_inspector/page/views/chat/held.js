// What only sessions can do with a branch: keep what follows an edit, pin, commit, and show its tokens.

import { sessionPath, tokensOf } from "../../lib/edits.js";
import { templateFields } from "./settings.js";
import { messagesOf } from "./tree.js";

export class Held {
  /** @param {object} chat the view */
  constructor(chat) {
    this.chat = chat;
    this.app = chat.app;
  }

  get tree() {
    return this.chat.tree;
  }

  /** Edit a message in the state of the branch `old`, so that the branch `leaf` goes on from there. */
  async editMiddle({ old, id, leaf, text, mode }) {
    const { client, notify, format } = this.app;
    const { tree, runs } = this.chat;
    const node = tree.get(id);
    const after = tree.get(old);
    if (after.role !== "assistant") return;
    try {
      const whole = await runs.sessionOf(old);
      const [session] = (await client.json("POST", sessionPath(whole.id, "fork"), { body: { at: whole.tokens } })).ids;
      const [before] = messagesOf([node]);
      const [after_] = messagesOf([{ ...node, content: text }]);
      const earlier = messagesOf(tree.path(node.parent)).map((one) => one.content).join("\n");
      const place = await this.placeOf(session, whole.tokens, before.content, earlier.split(before.content).length - 1);
      const body = { span: place.span, text: place.head + after_.content + place.tail, mode };
      const done = await client.json("POST", sessionPath(session, "edit"), { body });
      tree.patch(leaf, { session: { id: session, tokens: done.num_tokens, exact: done.exact } });
      const parts = [`${format.count(done.replayed, "token")} ran again`];
      if (done.blended) parts.push(`${format.number(done.blended)} were blended`);
      notify(`Edited in the middle: ${parts.join(", ")}, ${format.number(done.num_tokens - done.added - done.replayed - done.blended)} stayed as they were.`);
    } catch (error) {
      if (this.app.isAbort(error)) return;
      notify(`The branch is there, but its state was not edited: ${error.message} It runs in full with the next question.`, "error");
    }
    this.chat.library.touch();
  }

  /**
   * Return the tokens of a session in which a text stands for the `number + 1`st time, and what else these
   * tokens hold, before and behind it.
   */
  async placeOf(session, count, text, number) {
    const tokens = (await tokensOf(this.app, `session:${session}`, 0, count)).map((one) => one.text ?? "");
    const whole = tokens.join("");
    let at = -1;
    for (let found = 0; found <= number; found++) {
      at = whole.indexOf(text, at + 1);
      if (at < 0) throw new Error("the message's text is not found in the conversation as the template writes it.");
    }
    let [begin, start, stop, end] = [0, 0, 0, 0];
    while (begin + tokens[start].length <= at) begin += tokens[start++].length;
    for (end = begin, stop = start; end < at + text.length; stop++) end += tokens[stop].length;
    return { span: [start, stop], head: whole.slice(begin, at), tail: whole.slice(at + text.length, end) };
  }

  /** Keep the state of a branch in the server's memory, or no longer. */
  async pin(id) {
    const { client, notify } = this.app;
    const { tree } = this.chat;
    const node = tree.get(id);
    if (node.pin) {
      await client.json("DELETE", sessionPath(node.pin), {}).catch((error) => error.status !== 404 && Promise.reject(error));
      tree.patch(id, { pin: undefined });
      notify("No longer pinned");
    } else {
      const path = tree.path(id);
      const messages = messagesOf(path);
      const question = messages.findLastIndex((one) => one.role !== "assistant");
      const made = await client.json("POST", "v1/sessions", { body: { ...templateFields(tree.settings), messages: messages.slice(0, question + 1), pin: true, labels: { chat: this.chat.library.id } } });
      await this.chat.runs.said(made, path.slice(question + 1));
      tree.patch(id, { pin: made.id });
      notify("Pinned: its state stays in the server's memory for four hours without use");
    }
    this.chat.library.touch();
  }

  /** Commit a branch to the server's store, by a name. */
  async commit(id) {
    const { client, ask, notify, visible } = this.app;
    const { tree, runs } = this.chat;
    const proposed = (tree.get(id).name || tree.title || "main").replace(/[^A-Za-z0-9_-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40) || "main";
    const given = await ask(
      "Commit",
      [
        { name: "name", label: "Branch of the store", value: proposed, required: true, hint: "A new name, or one whose last commit is an earlier state of this branch." },
        { name: "message", label: "Message", hint: "May be left empty." },
      ],
      {
        action: "Commit",
        text: "The state is kept in the server's durable store. You can go back to it after a restart, and other sessions can check it out.",
        check: async ({ name, message }) => {
          const { id: session } = await runs.sessionOf(id);
          const { commit } = await client.json("POST", sessionPath(session, "commit"), { body: { name, ...(message ? { message } : {}) } });
          tree.patch(id, { commit: { name, id: commit.id } });
        },
      },
    );
    if (!given) return;
    this.chat.library.touch();
    notify(`Committed to ${visible(given.name, 60)}`);
  }

  /** Show an answer in another view. */
  async look(id, view, params) {
    const { id: session, all } = await this.chat.runs.sessionOf(id);
    const node = this.tree.get(id);
    const position = Math.max(0, Math.min(all - 1, (node.usage?.prompt ?? all - 1)));
    this.app.go(view, view === "token" ? { branch: `session:${session}`, position, ...params } : { branch: `session:${session}`, ...params });
  }

  /** Delete all sessions of a conversation that was deleted. */
  async releaseAll(chat) {
    if (!this.app.overview?.allow_edits) return;
    const { client } = this.app;
    const found = await client.json("GET", "v1/sessions", { params: { label: `chat=${chat}`, limit: 1000 } }).catch(() => ({ data: [] }));
    for (const one of found.data) await this.chat.runs.release(one.id);
  }

  /** Delete the sessions of messages that were removed. */
  release(nodes) {
    for (const { session, pin } of nodes) for (const id of [session?.id, pin]) if (id) void this.chat.runs.release(id);
  }
}
