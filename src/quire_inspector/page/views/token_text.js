/**
 * A branch's text as tokens that can be chosen: one part of it at a time, fetched when it is wanted.
 * The list is one stop of the Tab key; arrow keys move between tokens. Weights may colour it.
 */

import { el, fill } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { textNodes, visible } from "../lib/text.js";
import { css, readableOn } from "./inks.js";

/** Tokens that are shown at once. */
export const PART = 512;

let lists = 0;

export class TokenText {
  /**
   * @param {HTMLElement} host
   * @param {object} calls
   * @param {(start: number, stop: number) => Promise<{position: number, id: number, text: string}[]>} calls.fetch
   * @param {(position: number) => void} calls.onPick
   * @param {(error: Error) => void} calls.onProblem
   */
  constructor(host, calls) {
    this.calls = calls;
    lists += 1;
    this.prefix = `token-list-${lists}`;
    this.tokens = 0;
    this.start = 0;
    this.position = -1;
    /** @type {Map<number, HTMLElement>} */
    this.marks = new Map();
    this.order = 0;
    /** @type {{weights: ArrayLike<number>, inkOf: (share: number) => import("./inks.js").Ink} | null} */
    this.heat = null;
    this.list = el("div.token-list", {
      role: "listbox",
      tabIndex: 0,
      "aria-label": "Tokens of the branch",
      onclick: (event) => this.click(event),
      onkeydown: (event) => this.key(event),
    });
    this.where = el("span.token-where", { "aria-live": "off" });
    this.before = this.button("Earlier tokens", "‹", () => this.turn(-PART));
    this.after = this.button("Later tokens", "›", () => this.turn(PART));
    this.pager = el("div.token-pager", {}, this.before, this.where, this.after);
    host.append(this.list, this.pager);
  }

  button(label, sign, onclick) {
    return el("button.icon-button", { type: "button", "aria-label": label, title: label, onclick }, sign);
  }

  /**
   * Show a branch, and in it the part with a position.
   * @param {number} tokens length of the branch
   * @param {number} position -1: the last part, nothing chosen
   * @param {boolean} [again] fetch the part even if it is shown
   */
  async show(tokens, position, again = true) {
    this.tokens = tokens;
    this.position = Math.min(position, tokens - 1);
    const seen = this.position < 0 ? tokens - 1 : this.position;
    const start = Math.max(0, Math.floor(seen / PART) * PART);
    if (again || start !== this.start || this.marks.size === 0) await this.load(start);
    else this.markChosen();
  }

  async load(start) {
    this.order += 1;
    const order = this.order;
    this.start = start;
    const stop = Math.min(this.tokens, start + PART);
    this.where.textContent =
      this.tokens === 0 ? "no tokens" : `${format.number(start)} to ${format.number(stop - 1)} of ${format.count(this.tokens, "token")}`;
    this.before.disabled = start === 0;
    this.after.disabled = stop >= this.tokens;
    this.pager.hidden = this.tokens <= PART;
    if (this.tokens === 0) {
      this.marks.clear();
      fill(this.list);
      return;
    }
    this.list.setAttribute("aria-busy", "true");
    try {
      const tokens = await this.calls.fetch(start, stop);
      if (order === this.order) this.draw(tokens);
    } catch (error) {
      if (order === this.order) this.calls.onProblem(error);
    } finally {
      if (order === this.order) this.list.removeAttribute("aria-busy");
    }
  }

  draw(tokens) {
    this.marks.clear();
    const spans = tokens.map(({ position, id, text }) => {
      const shown = el(
        "span.token-mark",
        {
          id: `${this.prefix}-${position}`,
          role: "option",
          dataset: { position },
          "aria-selected": "false",
          "aria-label": `${text === null ? `token ${id}` : visible(text, 40) || "nothing"}, position ${position}`,
          title: `position ${position}, token ${id}`,
        },
        tokenText(text, id),
      );
      this.marks.set(position, shown);
      return shown;
    });
    fill(this.list, spans);
    this.paintHeat();
    this.markChosen();
  }

  /** Mark the chosen token and bring it into view within the list. */
  markChosen() {
    this.list.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    const mark = this.marks.get(this.position);
    if (!mark) {
      this.list.removeAttribute("aria-activedescendant");
      return;
    }
    mark.setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", mark.id);
    const [top, bottom] = [mark.offsetTop, mark.offsetTop + mark.offsetHeight];
    const { scrollTop, clientHeight } = this.list;
    if (top < scrollTop) this.list.scrollTop = top - 8;
    else if (bottom > scrollTop + clientHeight) this.list.scrollTop = bottom - clientHeight + 8;
  }

  /**
   * Colour tokens by weights; null takes the colours away.
   * @param {ArrayLike<number> | null} weights by position
   * @param {(share: number) => import("./inks.js").Ink} inkOf the colour of a share of the largest weight
   */
  showHeat(weights, inkOf) {
    this.heat = weights === null ? null : { weights, inkOf };
    this.paintHeat();
  }

  paintHeat() {
    const { heat } = this;
    let most = 0;
    if (heat !== null) {
      for (const position of this.marks.keys()) most = Math.max(most, heat.weights[position] ?? 0);
    }
    for (const [position, mark] of this.marks) {
      const weight = heat === null ? undefined : heat.weights[position];
      const shown = weight !== undefined && most > 0;
      const ink = shown ? heat.inkOf(Math.sqrt(weight / most)) : null;
      mark.style.background = ink === null ? "" : css(ink);
      mark.style.color = ink === null ? "" : readableOn(ink);
      mark.classList.toggle("heated", shown);
    }
  }

  turn(by) {
    this.load(Math.min(this.start + by, Math.floor((this.tokens - 1) / PART) * PART));
  }

  click(event) {
    const mark = event.target instanceof Element ? event.target.closest("[data-position]") : null;
    if (mark) this.pick(Number(mark.getAttribute("data-position")));
  }

  key(event) {
    const steps = {
      ArrowLeft: this.position - 1,
      ArrowRight: this.position + 1,
      ArrowUp: this.line(-1),
      ArrowDown: this.line(1),
      PageUp: this.position - PART,
      PageDown: this.position + PART,
      Home: 0,
      End: this.tokens - 1,
    };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.pick(Math.min(this.tokens - 1, Math.max(0, steps[event.key])));
  }

  /** Return the position one line further up or down, about where the chosen token stands. */
  line(direction) {
    const mark = this.marks.get(this.position);
    if (!mark) return this.start;
    const [x, y] = [mark.offsetLeft, mark.offsetTop];
    let position = this.position;
    for (;;) {
      position += direction;
      const next = this.marks.get(position);
      if (!next) return position;
      const lower = direction > 0 ? next.offsetTop > y : next.offsetTop < y;
      if (!lower) continue;
      const following = this.marks.get(position + direction);
      const passed = direction > 0 ? next.offsetLeft >= x : next.offsetLeft <= x;
      const ends = !following || (following.offsetTop !== next.offsetTop && next.offsetTop !== y);
      if (passed || ends) return position;
    }
  }

  pick(position) {
    this.show(this.tokens, position, false);
    this.calls.onPick(this.position);
  }
}

/** Show a token's text: its id without a tokenizer, a sign for an empty one. */
function tokenText(text, id) {
  if (text === null) return `⟨${id}⟩ `;
  return text === "" ? el("span.ctl", {}, "∅") : textNodes(text, { lines: true });
}

/** Return black or white, whichever can be read better on a colour as "rgb(...)". */
function inkOn(ground) {
  const [red, green, blue] = (ground.match(/[\d.]+/g) ?? [0, 0, 0]).map((value) => {
    const part = Number(value) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const light = 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05;
  return 1.05 / light > light / 0.05 ? "#fff" : "#000";
}
