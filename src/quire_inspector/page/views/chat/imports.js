// Files that hold conversations: exported here, messages as OpenAI has them, and what the pages of
// llama.cpp, Open WebUI and ChatGPT export. Trees stay trees.

import { FORMAT, Tree, titleOf } from "./tree.js";

const ROLES = ["system", "user", "assistant", "tool"];

/**
 * Return the conversations of a file's text: their documents, and the message that was shown last.
 * @returns {{document: object, leaf: string|null}[]} at least one
 * @throws {Error} that says what was found and what would be accepted
 */
export function conversationsOf(text, name = "") {
  const found = parsed(text);
  const listed = Array.isArray(found) ? found : [found];
  const own = (one) => one?.format === FORMAT && one.nodes && typeof one.nodes === "object";
  if (listed.length && listed.every(own)) return listed.map((one) => ({ document: new Tree(checked(one)).document(), leaf: null }));
  const messages = Array.isArray(found) ? found : found?.messages;
  const readers = [ofLlama, ofOpenWebUi, ofChatGpt];
  const reader = readers.find((one) => one(listed[0] ?? {}));
  if (reader) {
    const all = listed.map((one) => made(reader(one ?? {}))).filter(Boolean);
    if (all.length) return all;
  } else if (Array.isArray(messages) && messages.length) {
    return [{ document: plainMessages(messages, name), leaf: null }];
  }
  throw new Error('the file holds no conversation; a list of messages, {"messages": [...]}, and exports of this page, of llama.cpp, Open WebUI and ChatGPT are accepted');
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    // Open WebUI writes a conversation a line.
    const lines = text.trim().split("\n");
    try {
      if (lines.length > 1) return lines.map((line) => JSON.parse(line));
    } catch {
      // The first error says more.
    }
    throw new Error(`the file is no JSON: ${error.message}`);
  }
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

// -- messages as OpenAI has them -----------------------------------------------------

function plainMessages(messages, name) {
  const tree = new Tree();
  let parent = null;
  messages.forEach((message, at) => {
    const { role } = message ?? {};
    if (![...ROLES, "developer"].includes(role)) throw new Error(`message ${at + 1} has the role ${JSON.stringify(role ?? null)}; system, user, assistant and tool are accepted`);
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

// -- what other pages export -----------------------------------------------------------
//
// A reader returns null for what it does not know, else {title, shown, messages}; a message is
// {key, parent, role, content, files?, reasoning?, calls?, callId?}, or has no role: then only its
// place in the tree counts.

/** {conv, messages}, of llama.cpp's page. */
function ofLlama({ conv, messages }) {
  if (!conv || !Array.isArray(messages)) return null;
  return {
    title: conv.name,
    shown: conv.currNode,
    messages: messages.map((one) => ({
      key: one.id,
      parent: one.parent,
      role: one.type === "root" ? null : one.role,
      content: one.content,
      reasoning: one.reasoningContent ?? one.thinking,
      calls: listOf(one.toolCalls),
      callId: one.toolCallId,
      files: (Array.isArray(one.extra) ? one.extra : []).filter((extra) => typeof extra?.content === "string").map(({ name, content }) => ({ name: String(name ?? "file"), text: content })),
    })),
  };
}

function listOf(text) {
  try {
    const found = typeof text === "string" && text ? JSON.parse(text) : text;
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

/** {title, chat: {history: {messages, currentId}}}, of Open WebUI. */
function ofOpenWebUi({ title, chat }) {
  const all = chat?.history?.messages;
  if (!all || typeof all !== "object") return null;
  const thoughts = /<details type="reasoning"[^>]*>\s*(?:<summary>.*?<\/summary>)?([\s\S]*?)<\/details>\s*/g;
  return {
    title: title ?? chat.title,
    shown: chat.history.currentId,
    messages: Object.entries(all).map(([key, one]) => {
      const content = String(one?.content ?? "");
      const reasoning = [...content.matchAll(thoughts)].map(([, inner]) => inner.trim().replace(/^(&gt;|>) ?/gm, "")).join("\n\n");
      return { key, parent: one?.parentId, role: one?.role, content: content.replace(thoughts, ""), reasoning };
    }),
  };
}

/** {title, mapping, current_node}, of ChatGPT's archive. What its tools were sent and said is left out. */
function ofChatGpt({ title, mapping, current_node: shown }) {
  if (!mapping || typeof mapping !== "object") return null;
  const read = (message) => {
    const { author, content = {}, recipient = "all", metadata } = message ?? {};
    const hidden = metadata?.is_visually_hidden_from_conversation || recipient !== "all";
    if (!["system", "user", "assistant"].includes(author?.role) || hidden) return {};
    const parts = (content.parts ?? [content.text ?? ""]).map((part) => (typeof part === "string" ? part : part?.text ?? "(a part that is no text was not imported)"));
    return { role: author.role, content: content.content_type === "thoughts" ? "" : parts.join("\n") };
  };
  return { title, shown, messages: Object.entries(mapping).map(([key, one]) => ({ key, parent: one?.parent, ...read(one?.message) })) };
}

/** Return the tree of what a reader found; null if nothing was said in it. */
function made({ title, shown, messages }) {
  const tree = new Tree();
  const byKey = new Map(messages.map((one) => [one.key, one]));
  const ids = new Map([[null, null]]);
  const place = (key) => {
    if (!byKey.has(key)) return null;
    if (ids.has(key)) return ids.get(key);
    // A file may say that a message is its own ancestor.
    ids.set(key, null);
    const { parent, role, content, files, reasoning, calls, callId } = byKey.get(key);
    const above = place(parent ?? null);
    const says = ROLES.includes(role) && (content || calls?.length || files?.length);
    if (!says) return ids.set(key, above), above;
    const fields = { role, content: String(content ?? "") };
    if (reasoning) fields.reasoning = String(reasoning);
    if (files?.length) fields.files = files;
    if (calls?.length) fields.calls = calls;
    if (callId) fields.callId = callId;
    if (role === "assistant") fields.finish = "stop";
    ids.set(key, tree.add(above, fields).id);
    return ids.get(key);
  };
  for (const one of messages) place(one.key);
  if (!tree.size) return null;
  const first = [...tree.nodes.values()].find((node) => node.role === "user");
  [tree.title, tree.titled] = [String(title || titleOf(first?.content ?? "")).slice(0, 200), Date.now()];
  return { document: tree.document(), leaf: ids.get(shown) ?? null };
}
