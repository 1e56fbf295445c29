// Conversations in and out: messages as JSON, Markdown, the whole tree, state files.

import { conversationsOf } from "./imports.js";
import { Tree, fullText, messagesOf } from "./tree.js";
import { sessionPath } from "../../lib/edits.js";

/** Bytes of a file that is imported at most. */
const LARGEST = 200_000_000;

/** Return a branch as Markdown. */
function markdownOf(tree, leaf) {
  const roles = { user: "You", assistant: "Answer", system: "System", tool: "Tool result" };
  const parts = tree.path(leaf).map((node) => {
    const thoughts = node.reasoning ? `<details><summary>Thoughts</summary>\n\n${node.reasoning}\n\n</details>\n\n` : "";
    const calls = (node.calls ?? []).map((call) => `Calls \`${call.function.name}\`:\n\n\`\`\`json\n${call.function.arguments}\n\`\`\`\n\n`).join("");
    return `## ${roles[node.role] ?? node.role}\n\n${thoughts}${calls}${node.role === "user" ? fullText(node) : node.content}\n`;
  });
  return `# ${tree.title || "Conversation"}\n\n${parts.join("\n")}`;
}

/** Offer a file to be saved. */
export function save(name, parts, type) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export class Exchange {
  /** @param {object} chat the view */
  constructor(chat) {
    this.chat = chat;
    this.app = chat.app;
    this.input = this.app.el("input", { type: "file", accept: ".json,.quire,application/json", hidden: true, tabindex: "-1", "aria-hidden": "true" });
    this.input.addEventListener("change", () => {
      const [file] = this.input.files;
      // The same file may be chosen again.
      this.input.value = "";
      void this.take(file);
    });
  }

  get name() {
    return (this.chat.tree.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation";
  }

  choose() {
    this.input.click();
  }

  messages() {
    const found = { messages: messagesOf(this.chat.tree.path(this.chat.leaf)) };
    save(`${this.name}.json`, [JSON.stringify(found, null, 2)], "application/json");
  }

  markdown() {
    save(`${this.name}.md`, [markdownOf(this.chat.tree, this.chat.leaf)], "text/markdown");
  }

  all() {
    save(`${this.name}.tree.json`, [JSON.stringify(this.chat.tree.document(), null, 1)], "application/json");
  }

  /** Save all conversations, each with all branches. */
  async everything() {
    const found = await this.chat.library.everything();
    save("conversations.json", [JSON.stringify(found)], "application/json");
    this.app.announce(`${this.app.format.count(found.length, "conversation")} saved`);
  }

  /** Save the state file of the branch: what the model remembers of it, to go on anywhere without computing. */
  async state(id) {
    const { id: session } = await this.chat.runs.sessionOf(id);
    const response = await this.app.client.request("GET", sessionPath(session, "state"), { signal: this.app.signal });
    save(`${this.name}.quire`, [await response.blob()], "application/octet-stream");
  }

  /** Make a conversation of a file. */
  async take(file) {
    if (!file) return;
    try {
      if (/\.quire$/i.test(file.name)) return await this.takeState(file);
      if (file.size > LARGEST) throw new Error(`the file has ${this.app.format.bytes(file.size)}; at most ${this.app.format.bytes(LARGEST)} are accepted`);
      const found = conversationsOf(await file.text(), file.name);
      if (found.length === 1) await this.chat.adopt(found[0].document, found[0].leaf);
      else await this.takeMany(found);
    } catch (error) {
      if (this.app.isAbort(error)) return;
      this.app.notify(`${this.app.visible(file.name, 80)} was not imported: ${error.message}`, "error");
    }
    return undefined;
  }

  /** Make conversations of the many in an archive, the last one the latest. */
  async takeMany(found) {
    const { notify, format } = this.app;
    let done = 0;
    try {
      for (const { document } of found) {
        await this.chat.library.addOther(document);
        done += 1;
      }
      notify(`${format.count(done, "conversation")} ${done === 1 ? "was" : "were"} imported`);
    } catch (error) {
      if (this.app.isAbort(error)) throw error;
      throw new Error(`after ${done} of ${format.count(found.length, "conversation")}: ${error.message}`);
    }
  }

  /** A state file has the messages of a chat. Other text stands as one message, from which the model goes on. */
  async takeState(file) {
    const made = await (await this.app.client.upload("v1/sessions/state", file, { name: file.name.slice(0, 200) })).json();
    const found = await this.app.client.json("GET", sessionPath(made.id), {});
    const title = file.name.replace(/\.quire$/i, "");
    const session = { id: made.id, tokens: made.num_tokens, exact: found.exact };
    let tree = null;
    if (found.messages?.at(-1)?.role === "assistant") {
      try {
        tree = new Tree(conversationsOf(JSON.stringify(found.messages), title)[0].document);
        tree.patch(tree.leafBelow(null), { session });
      } catch {
        // Roles that this page does not know.
      }
    }
    if (!tree) {
      tree = new Tree({ title, titled: Date.now() });
      tree.add(null, { role: "assistant", content: found.text ?? "", finish: "stop", name: "state file", session });
    }
    await this.chat.adopt(tree.document());
  }
}
