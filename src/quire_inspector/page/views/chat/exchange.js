// Conversations in and out: messages as JSON, Markdown, the whole tree, state files.

import { FORMAT, Tree, fullText, messagesOf, titleOf } from "./tree.js";
import { sessionPath } from "../../lib/edits.js";

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

/**
 * Return the document of a conversation in a text: an exported tree, or messages as OpenAI has them.
 * @throws {Error} that says what was found and what would be accepted
 */
function documentOf(text, name = "") {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`the file is no JSON: ${error.message}`);
  }
  if (found?.format === FORMAT && found.nodes && typeof found.nodes === "object") return new Tree(checked(found)).document();
  const messages = Array.isArray(found) ? found : found?.messages;
  if (!Array.isArray(messages)) throw new Error("the file holds no conversation; a list of messages, {\"messages\": [...]}, or a conversation that was exported here is accepted");
  const tree = new Tree();
  let parent = null;
  messages.forEach((message, at) => {
    const { role } = message ?? {};
    if (!["system", "developer", "user", "assistant", "tool"].includes(role)) throw new Error(`message ${at + 1} has the role ${JSON.stringify(role ?? null)}; system, user, assistant and tool are accepted`);
    const fields = { role: role === "developer" ? "system" : role, content: plain(message.content, at) };
    if (typeof message.reasoning_content === "string") fields.reasoning = message.reasoning_content;
    if (Array.isArray(message.tool_calls) && message.tool_calls.length) fields.calls = message.tool_calls;
    if (role === "tool") Object.assign(fields, { callId: message.tool_call_id, tool: message.name });
    if (role === "assistant") fields.finish = "stop";
    parent = tree.add(parent, fields).id;
  });
  tree.title = name.replace(/\.json$/i, "") || titleOf(tree.path(parent).find((node) => node.role === "user")?.content ?? "");
  tree.titled = Date.now();
  return tree.document();
}

function checked(document) {
  const nodes = {};
  for (const [id, node] of Object.entries(document.nodes)) {
    if (!/^[0-9a-f]{12}$/.test(id) || typeof node !== "object" || node === null) throw new Error(`the conversation has a message with the id ${JSON.stringify(id).slice(0, 40)}, which is none`);
    const { session: _session, pin: _pin, pending: _pending, ...kept } = node;
    nodes[id] = { ...kept, id, parent: node.parent ?? null, content: String(node.content ?? ""), created: Number(node.created) || 0, changed: Number(node.changed) || 0 };
  }
  return { ...document, title: String(document.title ?? ""), nodes };
}

function plain(content, at) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) {
    return content.map((part) => {
      if (typeof part?.text !== "string") throw new Error(`message ${at + 1} has a part that is no text; pictures and sound are not accepted`);
      return part.text;
    }).join("");
  }
  throw new Error(`message ${at + 1} has a content that is neither a text nor a list of parts`);
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
    this.input.addEventListener("change", () => this.take(this.input.files[0]));
  }

  get name() {
    return (this.chat.tree.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation";
  }

  choose() {
    this.input.value = "";
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
      if (file.size > 20_000_000) throw new Error(`the file has ${this.app.format.bytes(file.size)}; at most 20 MB are accepted`);
      await this.chat.adopt(documentOf(await file.text(), file.name));
    } catch (error) {
      if (this.app.isAbort(error)) return;
      this.app.notify(`${this.app.visible(file.name, 80)} was not imported: ${error.message}`, "error");
    }
    return undefined;
  }

  /** A state file holds tokens and no messages, so its text stands as one, from which the model goes on. */
  async takeState(file) {
    const made = await (await this.app.client.upload("v1/sessions/state", file, { name: file.name.slice(0, 200) })).json();
    const found = await this.app.client.json("GET", sessionPath(made.id), {});
    const tree = new Tree({ title: file.name.replace(/\.quire$/i, ""), titled: Date.now() });
    tree.add(null, { role: "assistant", content: found.text ?? "", finish: "stop", name: "state file", session: { id: made.id, tokens: made.num_tokens, exact: found.exact } });
    await this.chat.adopt(tree.document());
  }
}
