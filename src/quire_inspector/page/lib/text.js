// Showing texts that others wrote: literally, with what cannot be seen made visible.

import { el } from "./dom.js";

// Control characters, soft hyphen, fillers, zero widths, marks and overrides of direction, separators
// of lines, invisible operators, tags, halves of surrogate pairs.
const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3164\ufeff\uffa0\ufff9-\uffff]|[\u{e0000}-\u{e0fff}]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu;
const JOINED = /\p{Extended_Pictographic}\ufe0f?\u200d(?=\p{Extended_Pictographic})/u;
// Persian and the scripts of India spell with joiners and non-joiners.
const SPELLED = /[\p{Script=Arabic}\p{Script=Syriac}\p{Script=Devanagari}\p{Script=Bengali}\p{Script=Gujarati}\p{Script=Gurmukhi}\p{Script=Kannada}\p{Script=Malayalam}\p{Script=Oriya}\p{Script=Sinhala}\p{Script=Tamil}\p{Script=Telugu}]$/u;

/** Return what stands for one hidden character: ↵, ⇥, a control picture, or its code point. */
function picture(char) {
  const code = char.codePointAt(0);
  if (char === "\n") return "↵";
  if (char === "\t") return "⇥";
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  if (code === 0xfffd) return char;
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** Return whether the zero width joiner at `index` joins two pictures, as in many emoji, or is how a script is spelled. */
function joins(text, index) {
  if (/[\u200c\u200d]/.test(text[index]) && SPELLED.test(text.slice(Math.max(0, index - 2), index))) return true;
  return text[index] === "\u200d" && JOINED.test(text.slice(Math.max(0, index - 3), index + 3));
}

/**
 * Return a text with hidden characters made visible, for attributes, titles and messages.
 * @param {any} text
 * @param {number} [limit] characters at most, the rest becomes "…"
 * @returns {string}
 */
export function visible(text, limit = Infinity) {
  const found = String(text ?? "").replace(HIDDEN, (char, index, whole) =>
    char === "\ufffd" || joins(whole, index) ? char : picture(char),
  );
  return found.length > limit ? `${found.slice(0, Math.max(0, limit - 1))}…` : found;
}

/**
 * Return nodes for a text in which pictures of hidden characters are set apart (class "ctl"), so that
 * a text that contains such a picture looks different.
 * @param {any} text
 * @param {{lines?: boolean}} [options] lines: also break the line behind each ↵
 * @returns {DocumentFragment}
 */
export function textNodes(text, { lines = false } = {}) {
  const whole = String(text ?? "");
  const found = document.createDocumentFragment();
  let last = 0;
  for (const match of whole.matchAll(HIDDEN)) {
    const [char] = match;
    if (char === "\ufffd" || joins(whole, match.index)) continue;
    if (match.index > last) found.append(whole.slice(last, match.index));
    found.append(el("span.ctl", {}, picture(char)));
    if (lines && char === "\n") found.append("\n");
    last = match.index + char.length;
  }
  if (last < whole.length) found.append(whole.slice(last));
  return found;
}

/** Return an element (class "name") with a user's name or text on one line, its direction isolated. */
export function named(text, props = {}) {
  return el("bdi.name", { title: visible(text, 300), ...props }, textNodes(text));
}
