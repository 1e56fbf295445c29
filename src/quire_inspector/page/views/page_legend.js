/** What the grid's colours and frames mean, with the numbers of pages that have them. */

import { el, fill } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { named } from "../lib/text.js";
import { STRENGTHS, STRENGTH_NAMES, branchInks, css } from "./inks.js";
import { OWNERS, SOMEBODY_ELSE, isHole, largestHolders } from "./page_model.js";

const LARGEST = 10;

/** Make one entry. */
function entry(kind, ink, words, count, more = null) {
  const swatch = el("span.swatch", { class: `swatch-${kind}`, "aria-hidden": "true", style: { "--ink": ink } });
  return el("li", { dataset: { kind } }, swatch, words, el("b", {}, format.number(count)), more);
}

/**
 * Draw the legend.
 * @param {HTMLElement} host
 * @param {object} shown
 * @param {import("./page_model.js").Pool} shown.pool
 * @param {ReturnType<typeof import("./inks.js").readTheme>} shown.theme
 * @param {string} shown.colour what gives the colour
 * @param {number | null} shown.evictions pages that are outlined; null: none are asked for
 * @param {number | null} shown.chosen pages of the chosen branch; null: none is chosen
 * @param {number} shown.nulls null pages of the chosen branch
 * @param {(id: string) => string} shown.nameOf
 * @param {(id: string) => void} shown.onBranch a branch was chosen
 */
export function showLegend(host, { pool, theme, colour, evictions, chosen, nulls, nameOf, onBranch }) {
  const owners = OWNERS.map((owner, code) => entry(owner, css(theme.owners[code]), `${owner} `, pool.counts[owner] ?? 0));
  let others = 0;
  let shared = 0;
  let holes = 0;
  for (let page = 0; page < pool.count; page += 1) {
    if (pool.holder[page] === SOMEBODY_ELSE) others += 1;
    if (pool.references[page] > 1) shared += 1;
    if (isHole(pool, page)) holes += 1;
  }
  const more = [
    others ? entry("other", null, "holder not shown ", others) : null,
    holes ? entry("hole", null, "let go of ", holes) : null,
    evictions === null ? null : entry("eviction", css(theme.eviction), "given up next ", evictions),
    chosen === null ? null : entry("chosen", null, "of the branch ", chosen, nulls ? `, ${format.count(nulls, "null page")}` : null),
  ];
  fill(
    host,
    el("ul.legend-list", { "aria-label": "Legend" }, owners, more),
    colour === "eviction" ? null : strengths(shared),
    colour === "branch" ? holders(pool, theme, nameOf, onBranch) : null,
    colour === "eviction" ? order(theme) : null,
  );
}

/** Make the scale of numbers of owners. */
function strengths(shared) {
  const steps = STRENGTHS.map((strength, at) =>
    el("span.ramp-step", { style: { "--strength": `${Math.round(100 * strength)}%` } }, STRENGTH_NAMES[at]),
  );
  return el("div.ramp", {}, el("span", {}, `Owners of a page (${format.number(shared)} shared)`), el("span.ramp-steps", {}, steps));
}

/** Make the scale of the order of eviction. */
function order(theme) {
  const ramp = el("span.order-ramp", { "aria-hidden": "true", style: { "--ink": css(theme.eviction) } });
  return el("div.ramp", {}, "given up late", ramp, "next; grey: not for room");
}

/** List the branches that hold most pages, each a button that chooses it. */
function holders(pool, theme, nameOf, onBranch) {
  const rows = largestHolders(pool, LARGEST).map(([id, pages]) =>
    el(
      "li",
      {},
      el(
        "button.legend-branch",
        { type: "button", onclick: () => onBranch(id) },
        el("span.swatch", { "aria-hidden": "true", style: { "--ink": css(branchInks.ink(id, theme.dark)) } }),
        named(nameOf(id)),
        el("b", {}, format.number(pages)),
      ),
    ),
  );
  const rest = pool.branches.length - rows.length;
  return el("ul.legend-list.legend-branches", { "aria-label": "Branches by pages" }, rows, rest > 0 ? el("li", {}, `and ${format.number(rest)} more`) : null);
}
