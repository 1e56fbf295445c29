// Tokens as a text in which each token can be picked, by mouse or keyboard.

import { el } from "./dom.js";
import { keys } from "./keys.js";
import { textNodes, visible } from "./text.js";

let strips = 0;

/** What stands for a token whose text is nothing, or not known. */
function contentOf({ id, text }) {
  if (text === null || text === undefined) return el("span.ctl", {}, id < 0 ? "[embedding]" : `[${id}]`);
  if (text === "") return el("span.ctl", {}, "∅");
  return textNodes(text, { lines: true });
}

/** Return a token in words, for attributes. */
export function tokenWords({ text, id }) {
  if (text === null || text === undefined) return id < 0 ? "an embedding" : `token ${id}`;
  if (text === "") return "a part of a character";
  return /^\s+$/.test(text) && !/[\n\t]/.test(text) ? (text.length === 1 ? "a space" : `${text.length} spaces`) : visible(text, 60);
}

/**
 * A list of tokens `{position, id, text}`. One of them is the present one; Enter or a click picks it.
 * `cut`: tokens from this position on are dimmed, as what a rewind would remove.
 */
export class TokenStrip {
  /**
   * @param {{label: string, pick?: (token: object, node: HTMLElement) => void, move?: (token: object) => void,
   *   keys?: Object<string, (token: object, node: HTMLElement) => any>, decorate?: (node: HTMLElement, token: object) => void}} options
   */
  constructor({ label, pick = () => {}, move = () => {}, keys: table = {}, decorate = () => {} }) {
    this.prefix = `tokens-${(strips += 1)}`;
    this.pick = pick;
    this.moved = move;
    this.decorate = decorate;
    this.tokens = [];
    this.nodes = [];
    this.index = -1;
    this.cutAt = null;
    this.element = el("div.tokens", { role: "listbox", "aria-label": label, tabindex: "0" });
    this.element.addEventListener("click", (event) => {
      const index = this.nodes.indexOf(event.target.closest("[role=option]"));
      if (index < 0) return;
      this.go(index);
      this.pick(this.tokens[index], this.nodes[index]);
    });
    this.element.addEventListener("focus", () => this.index < 0 && this.tokens.length && this.go(this.tokens.length - 1));
    const step = (by) => () => this.go(this.index + by);
    const acting = Object.fromEntries(
      Object.entries(table).map(([key, fn]) => [key, () => (this.tokens[this.index] ? fn(this.tokens[this.index], this.nodes[this.index]) : false)]),
    );
    const picked = () => this.tokens[this.index] && this.pick(this.tokens[this.index], this.nodes[this.index]);
    keys(this.element, {
      ArrowRight: step(1),
      ArrowLeft: step(-1),
      ArrowDown: () => this.vertical(1),
      ArrowUp: () => this.vertical(-1),
      Home: () => this.go(0),
      End: () => this.go(this.tokens.length - 1),
      Enter: picked,
      " ": picked,
      ...acting,
    });
  }

  /** Show other tokens. */
  set(tokens) {
    this.tokens = [];
    this.nodes = [];
    this.index = -1;
    this.element.replaceChildren();
    this.element.removeAttribute("aria-activedescendant");
    this.push(tokens);
  }

  /** Show more tokens behind. */
  push(tokens) {
    const nodes = tokens.map((token) => this.node(token));
    this.tokens.push(...tokens);
    this.nodes.push(...nodes);
    this.element.append(...nodes);
  }

  node(token) {
    const blank = typeof token.text === "string" && token.text.trim() === "";
    const node = el(
      "span.tok",
      {
        role: "option",
        "aria-selected": "false",
        id: `${this.prefix}-${token.position}`,
        title: `position ${token.position}, token ${token.id}`,
        "aria-label": blank ? tokenWords(token) : null,
        class: this.cutAt !== null && token.position >= this.cutAt ? "after" : "",
      },
      contentOf(token),
    );
    this.decorate(node, token);
    return node;
  }

  /** Dim tokens from a position on; null: none. */
  cut(position) {
    this.cutAt = position;
    this.nodes.forEach((node, index) => node.classList.toggle("after", position !== null && this.tokens[index].position >= position));
  }

  /** Make a token the present one. */
  go(index, { quiet = false } = {}) {
    if (!this.tokens.length) return;
    const next = Math.max(0, Math.min(this.tokens.length - 1, index));
    this.nodes[this.index]?.setAttribute("aria-selected", "false");
    this.index = next;
    const node = this.nodes[next];
    node.setAttribute("aria-selected", "true");
    this.element.setAttribute("aria-activedescendant", node.id);
    if (!quiet) {
      node.scrollIntoView({ block: "nearest" });
      this.moved(this.tokens[next]);
    }
  }

  /** Make the token at a position the present one, if it is shown. */
  goTo(position, options) {
    const index = this.tokens.findIndex((token) => token.position === position);
    if (index >= 0) this.go(index, options);
  }

  /** Go to the token that is drawn above or below. */
  vertical(by) {
    const here = this.nodes[this.index]?.getBoundingClientRect();
    if (!here) return this.go(0);
    for (let index = this.index + by; index >= 0 && index < this.nodes.length; index += by) {
      const box = this.nodes[index].getBoundingClientRect();
      const away = by > 0 ? box.top - here.top : here.top - box.top;
      if (away > 4 && (by > 0 ? box.right >= here.left : box.left <= here.left)) return this.go(index);
    }
    return this.go(by > 0 ? this.nodes.length - 1 : 0);
  }
}
