/**
 * The axis of one branch: what each pool holds of it, holes of its window, null pages, checkpoints of
 * recurrent layers, and the positions that a rewind reaches.
 */

import { el, fill, icon } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { named } from "../lib/text.js";
import { branchName } from "./branch_picker.js";
import { PositionAxis, landing } from "./position_axis.js";

/** Name the layers of a pool: "Layers 0–3, 7". */
export function layerNames(layers) {
  if (layers.length === 0) return "No layers";
  const parts = [];
  for (const layer of layers) {
    const last = parts.at(-1);
    if (last && layer === last[1] + 1) last[1] = layer;
    else parts.push([layer, layer]);
  }
  const words = parts.map(([first, last]) => (first === last ? String(first) : `${first}–${last}`));
  const shown = words.length > 4 ? [...words.slice(0, 3), `… ${words.at(-1)}`] : words;
  return `${layers.length === 1 ? "Layer" : "Layers"} ${shown.join(", ")}`;
}

/**
 * Split a branch's positions in one pool into held rows, holes, and null pages: pages of which no row
 * is held.
 * @param {[number, number][]} held half-open, ascending
 * @param {number} computed positions that were computed
 * @param {number} pageTokens
 * @returns {import("./position_axis.js").Span[]}
 */
export function spansOf(held, computed, pageTokens) {
  const spans = held.map(([start, stop]) => ({ start, stop, kind: "held" }));
  let before = 0;
  const gaps = [];
  for (const [start, stop] of held) {
    if (start > before) gaps.push([before, start]);
    before = Math.max(before, stop);
  }
  if (before < computed) gaps.push([before, computed]);
  for (const [start, stop] of gaps) {
    const first = Math.ceil(start / pageTokens) * pageTokens;
    const last = stop === computed && before < computed ? stop : Math.floor(stop / pageTokens) * pageTokens;
    if (last <= first) {
      spans.push({ start, stop, kind: "hole" });
      continue;
    }
    if (first > start) spans.push({ start, stop: first, kind: "hole" });
    spans.push({ start: first, stop: last, kind: "null" });
    if (last < stop) spans.push({ start: last, stop, kind: "hole" });
  }
  return spans.sort((a, b) => a.start - b.start);
}

export class BranchAxis {
  /**
   * @param {HTMLElement} host
   * @param {any} app
   */
  constructor(host, app) {
    this.app = app;
    this.branch = null;
    this.pools = [];
    /** Positions of kept states of recurrent layers; null: there are no such layers. */
    this.kept = null;
    this.head = el("div.axis-head");
    this.body = el("div");
    this.legend = el("ul.axis-legend", { "aria-label": "Legend of the axis" });
    host.append(this.head, this.body, this.legend);
    this.axis = new PositionAxis(this.body, (position) => this.read(position));
    for (const [kind, words] of [
      ["held", "held"],
      ["hole", "hole: gone, its page is kept"],
      ["null", "null page: all of it is gone"],
      ["reachable", "a rewind lands here at once"],
      ["rerun", "a rewind lands on the state before and runs tokens again"],
      ["mark", "state of recurrent layers that is kept"],
    ]) {
      this.legend.append(el("li", { dataset: { kind } }, el("span.axis-key", { class: `key-${kind}`, "aria-hidden": "true" }), words));
    }
    this.show(null, []);
  }

  close() {
    this.axis.close();
  }

  /**
   * @param {any | null} branch a branch of `/v1/state/history`
   * @param {any[]} pools of the overview
   */
  show(branch, pools) {
    this.branch = branch;
    this.pools = pools;
    const hidden = branch === null;
    this.body.hidden = hidden;
    this.legend.hidden = hidden;
    if (hidden) {
      fill(this.head, el("h2", {}, "A branch's positions"), el("p.hint", {}, "Choose a branch to see what is held of it, and where a rewind lands."));
      return;
    }
    const facts = [
      format.count(branch.num_tokens, "token"),
      `${format.number(branch.computed)} computed`,
      `${format.count(branch.pages, "page")}, ${format.number(branch.shared_pages)} shared`,
      branch.window ? `window ${format.number(branch.window[0])}, sink ${format.number(branch.window[1])}` : null,
      branch.held.length === 0 ? "nothing of it is in the pools" : null,
      branch.busy ? "busy" : null,
      branch.pinned ? "pinned" : null,
      branch.modified ? "written into" : null,
      branch.exact ? null : "approximate",
    ].filter((fact) => fact !== null);
    const look = el("button.button.small", { type: "button", onclick: () => this.app.go("token", { branch: branch.id }) }, "Its tokens");
    fill(
      this.head,
      el("h2", {}, icon(branch.kind, { class: `kind-${branch.kind}` }), named(branchName(branch))),
      el("p.hint", {}, facts.join(" · ")),
      look,
    );
    const rows = branch.held.map((held) => {
      const spans = spansOf(held.ranges, branch.computed, pools[held.pool]?.page_tokens ?? 1);
      return { label: this.layersOf(held), spans };
    });
    this.kept = pools.some(({ kind }) => kind === "states") ? [0, ...branch.checkpoints] : null;
    if (this.kept !== null) {
      const marks = branch.checkpoints.map((position) => ({ position, title: `state kept at ${position}` }));
      rows.push({ label: "Kept states", spans: [], marks });
    }
    for (const entry of this.legend.children) {
      const { kind } = entry.dataset;
      const recurrent = kind === "rerun" || kind === "mark";
      entry.hidden = this.kept === null ? recurrent : kind === "reachable";
    }
    const kind = this.kept === null ? "reachable" : "rerun";
    const reachable = branch.reachable.map(([start, stop]) => ({ start, stop: Math.min(stop, branch.num_tokens), kind }));
    rows.push({ label: "Rewind", spans: reachable, marks: this.landings(branch) });
    this.axis.show({ tokens: branch.num_tokens, rows });
  }

  /** Return the marks of the positions on which rewinds land, where layers are recurrent. */
  landings(branch) {
    const stands = (this.kept ?? []).filter((one) => landing(branch.reachable, this.kept, one) === one);
    return stands.map((position) => ({ position, title: `a rewind lands on ${position}` }));
  }

  /** Name the layers of a part that is held. */
  layersOf(held) {
    return layerNames(this.pools[held.pool]?.layers ?? []);
  }

  /** Say a position in words: what is held of it, and where a rewind to it lands. */
  read(position) {
    const { branch } = this;
    if (branch === null) return "";
    if (position >= branch.num_tokens) return `Position ${format.number(position)}: the end of the branch, where it goes on.`;
    const missing = branch.held
      .filter(({ ranges }) => !ranges.some(([start, stop]) => start <= position && position < stop))
      .map((held) => this.layersOf(held).toLowerCase());
    const beyond = position >= branch.computed;
    const state = beyond
      ? "not computed yet"
      : missing.length === 0
        ? "held by all layers"
        : `not held by ${missing.join(" and ")}`;
    const lands = landing(branch.reachable, this.kept, position);
    const rewind =
      lands === position
        ? "a rewind lands here"
        : lands < 0
          ? `a rewind here runs ${format.count(position, "token")} again`
          : `a rewind here lands on ${format.number(lands)} and runs ${format.count(position - lands, "token")} again`;
    return `Position ${format.number(position)}: ${state}; ${rewind}.`;
  }
}
