// Markdown as elements. markdown-it reads it; what is shown is made by `el` from its tokens, so that no
// text is ever parsed as HTML. Pictures are links, because the page loads nothing from elsewhere.

import { append } from "../../lib/dom.js";
import { script } from "../../lib/vendor.js";
import { codeBlock } from "./code.js";
import { formula, mathRules } from "./math.js";

const TAGS = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "em", "strong", "s"]);
const SAFE = /^(https?|mailto):/i;
/** Characters from which a message is shown as it is written. */
const LONGEST = 400_000;

let parser = null;

/** Load the parser. Until then messages are shown as they are written. */
function loadMarkdown() {
  return script("markdown-it.min.js").then(() => {
    parser ??= make();
  });
}

function make() {
  const made = globalThis.markdownit({ html: false, linkify: true, breaks: false, typographer: false });
  mathRules(made);
  return made;
}

/** A text that is drawn as Markdown, and that grows: only the blocks that changed are made again. */
export class Markdown {
  /** @param {object} app */
  constructor(app) {
    this.app = app;
    this.element = app.el("div.markdown", { dir: "auto" });
    this.keys = [];
    this.text = null;
  }

  clear() {
    this.text = null;
    this.keys = [];
    this.element.replaceChildren();
  }

  /** Show a text as it was written. */
  written(text) {
    if (text === this.text) return;
    this.clear();
    this.text = text;
    this.element.append(this.app.el("pre.written", { tabindex: "0", dir: "auto" }, text));
  }

  /** Show a text. */
  show(text) {
    if (text === this.text) return;
    this.text = text;
    if (!parser && text) {
      loadMarkdown().then(
        () => {
          const now = this.text;
          this.clear();
          this.show(now);
        },
        () => {},
      );
    }
    if (!parser || text.length > LONGEST) {
      this.keys = [];
      this.app.fill(this.element, this.app.el("p.plain", {}, text));
      return;
    }
    const blocks = topLevel(parser.parse(text, {}), text.split("\n"));
    let same = 0;
    while (same < blocks.length && same < this.keys.length && blocks[same].key === this.keys[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of blocks.slice(same)) this.element.append(drawn(this.app, block.tokens));
    this.keys = blocks.map((block) => block.key);
  }
}

/** Cut tokens into those of each block at the top, each with a key that changes when it does. */
function topLevel(tokens, lines) {
  const found = [];
  let begin = 0;
  let depth = 0;
  tokens.forEach((token, at) => {
    depth += token.nesting;
    if (depth > 0) return;
    const first = tokens[begin];
    const [from, to] = first.map ?? [0, 0];
    // References to links may be defined anywhere, so links are a part of the key.
    const links = tokens.slice(begin, at + 1).flatMap((one) => (one.children ?? []).map((child) => child.attrGet?.("href") ?? "")).join(" ");
    found.push({ tokens: tokens.slice(begin, at + 1), key: `${first.type}\n${lines.slice(from, to).join("\n")}\n${links}` });
    begin = at + 1;
  });
  return found;
}

/** Make one element of a block's tokens. */
function drawn(app, tokens) {
  const { el } = app;
  const root = document.createDocumentFragment();
  const open = [root];
  const top = () => open.at(-1);
  const enter = (node) => (top().append(node), open.push(node));
  for (const token of tokens) {
    if (token.type === "inline") {
      // A list, a table or a quotation goes the way of its first words: markers stand on that side.
      const outer = root.firstElementChild;
      if (outer && top() !== outer && !outer.dir) outer.dir = isRightToLeft(token.content) ? "rtl" : "ltr";
      append(top(), inlines(app, token.children ?? []));
    } else if (token.type === "fence" || token.type === "code_block") {
      top().append(codeBlock(app, token.content.replace(/\n$/, ""), token.info?.trim() ?? ""));
    } else if (token.type === "math") {
      top().append(formula(app, token.content, true));
    } else if (token.type === "hr") {
      top().append(el("hr"));
    } else if (token.nesting > 0) {
      if (token.hidden) open.push(top());
      else enter(block(app, token));
    } else if (token.nesting < 0) {
      open.pop();
    } else {
      append(top(), token.content);
    }
  }
  const [only] = root.childNodes;
  // A table scrolls within itself.
  return only?.nodeName === "TABLE" ? el("div.table-scroll", { tabindex: "0", role: "region", "aria-label": "Table" }, only) : only ?? document.createTextNode("");
}

/** Return whether the first letter of a text is of a script that is written from right to left. */
function isRightToLeft(text) {
  return /^[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]$/u.test(/\p{L}/u.exec(text)?.[0] ?? "");
}

function block(app, token) {
  const tag = TAGS.has(token.tag) ? token.tag : "div";
  // The page has its own first headings.
  const shown = /^h[1-6]$/.test(tag) ? `h${Math.min(6, Number(tag[1]) + 2)}` : tag;
  const props = {};
  if (tag === "ol" && token.attrGet("start")) props.start = token.attrGet("start");
  const align = /text-align:(left|right|center)/.exec(token.attrGet("style") ?? "")?.[1];
  if (align) props.class = `align-${align}`;
  if (tag === "p" || shown[0] === "h") props.dir = "auto";
  return app.el(shown, props);
}

function inlines(app, tokens) {
  const { el } = app;
  const root = document.createDocumentFragment();
  const open = [root];
  const top = () => open.at(-1);
  for (const token of tokens) {
    if (token.type === "text") append(top(), app.textNodes(token.content));
    else if (token.type === "softbreak") append(top(), "\n");
    else if (token.type === "hardbreak") top().append(el("br"));
    else if (token.type === "code_inline") top().append(el("code", { dir: "ltr" }, token.content));
    else if (token.type === "math") top().append(formula(app, token.content, token.meta.displayed));
    else if (token.type === "image") top().append(link(app, token.attrGet("src"), token.content || token.attrGet("src")));
    else if (token.type === "link_open") {
      const node = link(app, token.attrGet("href"));
      top().append(node);
      open.push(node);
    } else if (token.nesting > 0) {
      const node = el(TAGS.has(token.tag) ? token.tag : "span");
      top().append(node);
      open.push(node);
    } else if (token.nesting < 0) open.pop();
    else append(top(), app.textNodes(token.content));
  }
  return root;
}

function link(app, href, ...children) {
  if (!SAFE.test(href ?? "")) return app.el("span.dead-link", { title: app.visible(href ?? "", 200) }, children);
  return app.el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: app.visible(href, 200) }, children);
}
