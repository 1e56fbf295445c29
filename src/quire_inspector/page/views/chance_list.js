/** How probable a token was, and what could have come instead. */

import { el, fill } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { textNodes, visible } from "../lib/text.js";

const MASKS = {
  json: "a JSON schema",
  json_object: "any JSON object",
  regex: "a regular expression",
  choice: "a choice",
  grammar: "a grammar",
};

/** Show a token's text as a mark. */
export function tokenMark(text, id) {
  if (text === null || text === undefined) return el("code.token-chip", {}, `⟨${id}⟩`);
  return el("code.token-chip", {}, text === "" ? el("span.ctl", {}, "∅") : textNodes(text));
}

/** Say where a generation ended. */
function stopOf(stop) {
  const words = {
    stop: "A generation stopped right before this position",
    length: "A generation reached its length right before this position",
    abort: "A generation was given up right before this position",
  }[stop.finish_reason] ?? `A generation ended right before this position (${visible(stop.finish_reason, 40)})`;
  const reason = stop.stop_reason;
  const by = reason === null || reason === undefined ? "" : typeof reason === "number" ? `, by token ${reason}` : `, by “${visible(reason, 60)}”`;
  return `${words}${by}; it began at position ${format.number(stop.start)}.`;
}

/** Say under which mask a token was drawn. */
function maskOf(mask, vocabulary) {
  const kind = MASKS[mask.kind] ?? visible(mask.kind, 40);
  const allowed = mask.allowed === null ? "how many tokens it allowed was not counted" : `it allowed ${format.number(mask.allowed)} of ${format.count(vocabulary, "token")}`;
  return `Drawn under the mask of ${kind}: ${allowed}.`;
}

/**
 * Draw the document of `/v1/state/token`.
 * @param {HTMLElement} host
 * @param {any} document
 */
export function showChances(host, document) {
  const { token } = document;
  const end = document.id === null;
  const head = el(
    "div.chance-head",
    {},
    end ? el("span", {}, "After the last token") : tokenMark(document.text, document.id),
    token === null
      ? el("span.hint", {}, end ? "what the model would say next" : document.position === 0 ? "the first token: nothing comes before it" : "not a token whose probability is known")
      : el("span.chance-figure", {}, el("b", {}, format.share(token.probability)), ` rank ${format.number(token.rank)}`),
  );
  const most = Math.max(1e-9, ...document.alternatives.map((one) => one.probability));
  const listed = document.alternatives.some((one) => one.id === document.id);
  const all = listed || token === null ? document.alternatives : [...document.alternatives, token];
  const bars = all.map((one) => {
    const chosen = one.id === document.id;
    return el(
      "li.chance",
      { class: chosen ? "chosen" : null },
      el("span.chance-rank", {}, format.number(one.rank)),
      tokenMark(one.text, one.id),
      el("span.chance-bar", { "aria-hidden": "true" }, el("span", { style: { width: `${Math.max(0.5, (100 * one.probability) / most)}%` } })),
      el("span.chance-share", {}, format.share(one.probability)),
      chosen ? el("span.sr-only", {}, "the token that is there") : null,
    );
  });
  const facts = [
    document.entropy === null ? null : ["Entropy", `${format.number(document.entropy, 3)} nats`],
    token === null || token.logprob === null ? null : ["Log-probability", format.number(token.logprob, 3)],
    end ? null : ["Came", document.generated ? "generated" : "given"],
    ["Token id", end ? "–" : String(document.id)],
    document.computed ? ["Computed for it", format.count(document.num_run, "token")] : null,
  ].filter((fact) => fact !== null);
  fill(
    host,
    head,
    document.stop === null ? null : el("p.note", {}, stopOf(document.stop)),
    document.mask === null ? null : el("p.note", {}, maskOf(document.mask, document.vocab_size)),
    document.exact ? null : el("p.note.warn", {}, "The state before it was written into, blended or converted, so these numbers are of that state."),
    bars.length ? el("ol.chances", { "aria-label": "Most probable tokens there" }, bars) : null,
    el("dl.facts", {}, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
  );
}
