/** What is known of one request: its phases, what it reused and why no more, its tokens, its end. */

import { el, fill } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { visible } from "../lib/text.js";
import { laneName } from "./time_model.js";

const ENDS = {
  stop: "its text stopped",
  length: "as many tokens as were asked for",
  abort: "given up",
  tool_calls: "it called a tool",
  error: "an error",
};
const STOPS = {
  eos: "the model's end of text",
  stop_string: "a stop string",
  stop_token: "a stop token",
  context: "the end of the context",
};

/** Why the state of no more tokens was reused, in the words of `quire.base.outputs.MISSES`. */
const MISSES = {
  none: "nothing that was kept begins with more of this prompt",
  other_text: "token {at} differs from a text that was computed before",
  other_adapter: "the first {at} tokens were computed under another adapter, which gives another state",
  other_salt: "the first {at} tokens were computed under another cache_salt, which nothing is shared with",
  evicted: "the state of the first {at} tokens was there and has been given up",
  window: "windows have let go of what a continuation at {at} needs",
  no_checkpoint: "{at} tokens were known, and recurrent layers kept no state there",
  too_expensive: "to load the state of the first {at} tokens takes longer than to compute it",
  damaged: "what a tier has of the state of the first {at} tokens is damaged",
  unreachable: "a tier that may have more did not answer",
};

/**
 * Say a request's reuse by tier, as parts of a bar.
 * @param {any} request
 */
function reuseOf(request) {
  const tiers = Object.entries(request.by_tier ?? {}).filter(([, tokens]) => tokens > 0);
  const reused = tiers.reduce((sum, [, tokens]) => sum + tokens, 0);
  const fresh = Math.max(0, request.prompt_tokens - Math.max(reused, request.cached_tokens ?? 0));
  const parts = tiers.map(([tier, tokens], at) => ({ words: `${tier} ${format.number(tokens)}`, tokens, kind: `reuse-${at % 4}` }));
  if (fresh > 0) parts.push({ words: `run ${format.number(fresh)}`, tokens: fresh, kind: "reuse-run" });
  const total = parts.reduce((sum, part) => sum + part.tokens, 0);
  if (total === 0) return null;
  return [
    el(
      "div.reuse-bar",
      { role: "img", "aria-label": parts.map((part) => part.words).join(", ") },
      parts.map((part) => el("span", { class: part.kind, style: { width: `${(100 * part.tokens) / total}%` } })),
    ),
    el("p.hint", {}, parts.map((part) => part.words).join(" · ")),
  ];
}

/** Say why no more of the prompt was reused. */
function missOf(request) {
  if (!request.miss) return "–";
  const at = request.missed_at === null || request.missed_at === undefined ? "?" : format.number(request.missed_at);
  return (MISSES[request.miss] ?? visible(request.miss, 300)).replace("{at}", at);
}

/** Say why a request ended. */
function endOf(request) {
  if (request.error) return `${ENDS.error}: ${visible(request.error, 100)}`;
  if (request.finish_reason === null || request.finish_reason === undefined) return "–";
  const words = ENDS[request.finish_reason] ?? visible(request.finish_reason, 60);
  const stop = request.stop ? (STOPS[request.stop] ?? visible(request.stop, 60)) : null;
  return stop ? `${words}: ${stop}` : words;
}

/** Make rows of facts, without those that are null. */
function facts(rows) {
  return el("dl.facts", {}, rows.filter(([, value]) => value !== null).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/**
 * Draw a request's details.
 * @param {HTMLElement} host
 * @param {any | null} request a document of the timeline
 * @param {number} now
 * @param {number} chunks pieces of its prompt that were seen
 * @param {() => void} onFit the reader wants to see all of it
 */
export function showLane(host, request, now, chunks, onFit) {
  if (request === null) {
    fill(
      host,
      el("h2", {}, "A request"),
      el("p.hint", {}, "Click a lane, or move to one with the up and down keys, to see what it reused and why it ended."),
    );
    return;
  }
  const stop = request.finished ?? now;
  const times = new Map();
  request.phases.forEach(([phase, start], at) => {
    times.set(phase, (times.get(phase) ?? 0) + (request.phases[at + 1]?.[1] ?? stop) - start);
  });
  const phases = el(
    "ul.phase-list",
    {},
    [...times].map(([phase, seconds]) =>
      el("li", {}, el("span.phase-key", { class: `phase-${phase}`, "aria-hidden": "true" }), `${phase} `, el("b", {}, format.seconds(seconds))),
    ),
  );
  const head = el(
    "div.page-head",
    {},
    el("h2", {}, laneName(request)),
    el("span.tag", {}, request.finished === null ? request.phase : "finished"),
    el("span.spacer"),
    el("button.button.small", { type: "button", onclick: onFit }, "Zoom to it"),
  );
  if (request.own === false) {
    fill(host, head, phases, el("p.hint", {}, "It belongs to another API key, so only its times are shown."));
    return;
  }
  const first = request.first_token;
  const between = request.output_tokens > 1 && first !== null ? (request.last_token - first) / (request.output_tokens - 1) : null;
  fill(
    host,
    head,
    phases,
    facts([
      ["Id", el("code.wrap", {}, visible(request.id, 120))],
      ["In all", format.seconds(stop - request.arrival)],
      ["First token", first === null ? "–" : `after ${format.seconds(first - request.arrival)}`],
      ["Between tokens", between === null ? "–" : format.seconds(between)],
      ["Prompt", `${format.count(request.prompt_tokens, "token")}${chunks ? `, in ${format.count(request.chunks ?? chunks, "piece")}` : ""}`],
      ["Output", `${format.count(request.output_tokens, "token")}${request.max_tokens ? ` of at most ${format.number(request.max_tokens)}` : ""}`],
      ["Ended by", request.finished === null ? "still under way" : endOf(request)],
    ]),
    el("h3", {}, "Reuse of the prompt"),
    reuseOf(request),
    facts([
      ["Why no more", missOf(request)],
      ["Replayed", request.replayed_tokens ? format.count(request.replayed_tokens, "token") : null],
      ["Blended", request.blend ? `${format.count(request.blend.blended, "token")}, ${format.number(request.blend.recomputed)} run again` : null],
    ]),
    el("h3", {}, "How it was asked"),
    facts([
      ["Adapter", request.adapter === null ? "none" : visible(request.adapter, 80)],
      ["Priority", format.number(request.priority)],
      ["Temperature", request.temperature === null ? "–" : format.number(request.temperature, 3)],
      ["Top p", request.top_p === null || request.top_p === undefined ? null : format.number(request.top_p, 3)],
      ["Structured", request.structured === null ? null : visible(request.structured, 40)],
      ["Preempted", request.preemptions ? `${format.count(request.preemptions, "time")}` : null],
    ]),
  );
}
