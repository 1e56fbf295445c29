/**
 * A pool's document decoded, and the picture that the grid draws of it.
 */

import { decode } from "../lib/decode.js";
import { branchInks, mix, strengthOf, tint } from "./inks.js";

export const OWNERS = ["free", "evictable", "held", "pinned"];
export const SOMEBODY_ELSE = -2;
/** Free pages behind the last one in use that are drawn, about. */
const MARGIN = 256;

/**
 * @typedef {object} Pool
 * @property {number} pool
 * @property {number} reading
 * @property {number} count
 * @property {Uint16Array} references
 * @property {Uint8Array} owner
 * @property {Int32Array} holder
 * @property {Int32Array} position
 * @property {Int32Array} eviction
 * @property {string[]} branches
 * @property {Record<string, number>} counts
 */

/**
 * Decode a document of `/v1/state/pages`.
 * @param {any} document
 * @returns {Pool}
 */
export function poolOf(document) {
  return {
    pool: document.pool,
    reading: document.reading,
    count: document.num_pages,
    references: decode.u2(document.references),
    owner: decode.u1(document.owner),
    holder: decode.i4(document.holder),
    position: decode.i4(document.position),
    eviction: decode.i4(document.eviction),
    branches: document.branches,
    counts: document.counts,
  };
}

/**
 * Return the pages that the next evictions take.
 * @param {Pool} pool
 * @param {number} limit evictions
 * @returns {Map<number, number>} the place of each page, from 0
 */
export function nextEvictions(pool, limit) {
  const found = new Map();
  for (let page = 0; page < pool.count; page += 1) {
    const place = pool.eviction[page];
    if (place >= 0 && place < limit) found.set(page, place);
  }
  return found;
}

/**
 * Return the picture of a pool.
 * @param {Pool} pool
 * @param {"owner" | "branch" | "eviction"} by what gives the colour
 * @param {ReturnType<typeof import("./inks.js").readTheme>} theme
 * @param {number} count pages to draw, from the first on
 */
export function pictureOf(pool, by, theme, count) {
  const kinds = new Uint32Array(count);
  /** @type {import("./page_tiles.js").Tile[]} */
  const tiles = [
    { ink: mix(theme.ground, theme.owners[0], 0.55), edge: theme.owners[0], pattern: "hollow" },
    { ink: theme.ground, edge: mix(theme.ground, theme.text, 0.28), pattern: "hatched" },
  ];
  /** @type {Map<number, number>} */
  const known = new Map();
  let latest = 1;
  if (by === "eviction") for (const place of pool.eviction) latest = Math.max(latest, place);
  for (let page = 0; page < count; page += 1) {
    const owner = pool.owner[page];
    if (owner === 0) {
      kinds[page] = isHole(pool, page) ? 1 : 0;
      continue;
    }
    const strength = strengthOf(pool.references[page]);
    const holder = pool.holder[page];
    const shade = by === "branch" ? holder + 2 : by === "eviction" ? shadeOf(pool.eviction[page], latest) : 0;
    const other = holder === SOMEBODY_ELSE ? 1 : 0;
    const key = ((shade * 4 + owner) * 5 + strength) * 2 + other;
    let kind = known.get(key);
    if (kind === undefined) {
      kind = tiles.length;
      known.set(key, kind);
      const base = inkOf(pool, by, theme, owner, holder, shade);
      const ink = by === "eviction" ? base : tint(base, theme.ground, strength);
      const pattern = other ? "hatched" : owner === 3 ? "dotted" : "plain";
      tiles.push({ ink, edge: other ? mix(ink, theme.ground, 0.45) : theme.ground, pattern });
    }
    kinds[page] = kind;
  }
  return { count, kinds, tiles };
}

/**
 * Return whether a page stands for rows that a branch has let go of, as in a state file.
 * @param {Pool} pool
 * @param {number} page
 */
export function isHole(pool, page) {
  return pool.owner[page] === 0 && pool.holder[page] !== -1;
}

/**
 * Return the branches that are the first holders of most pages, with their numbers of pages.
 * @param {Pool} pool
 * @param {number} most branches to return
 * @returns {[string, number][]}
 */
export function largestHolders(pool, most) {
  const counts = new Array(pool.branches.length).fill(0);
  for (const holder of pool.holder) if (holder >= 0) counts[holder] += 1;
  return pool.branches
    .map((id, at) => /** @type {[string, number]} */ ([id, counts[at]]))
    .sort((a, b) => b[1] - a[1])
    .slice(0, most)
    .filter(([, pages]) => pages > 0);
}

/**
 * Return how many pages are worth drawing: all, or those up to a little after the last one in use.
 * @param {Pool} pool
 */
export function worthDrawing(pool) {
  let last = pool.count - 1;
  while (last >= 0 && pool.owner[last] === 0 && !isHole(pool, last)) last -= 1;
  const wanted = Math.max(MARGIN, Math.ceil(((last + 1) * 1.1) / MARGIN) * MARGIN);
  return pool.count - wanted < MARGIN ? pool.count : wanted;
}

/** Return one of 13 shades for a place in the order of eviction: 0 never, 12 next. */
function shadeOf(place, latest) {
  return place < 0 ? 0 : 12 - Math.min(11, Math.floor((12 * place) / (latest + 1)));
}

function inkOf(pool, by, theme, owner, holder, shade) {
  if (by === "owner") return theme.owners[owner];
  if (by === "eviction") return shade === 0 ? mix(theme.ground, theme.text, 0.18) : mix(theme.ground, theme.eviction, shade / 12);
  return holder >= 0 ? branchInks.ink(pool.branches[holder], theme.dark) : theme.other;
}
