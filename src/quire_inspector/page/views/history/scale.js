// Where positions of tokens are drawn: from 0 to 1 across the tree.

/* global d3 */

/**
 * @typedef {object} Scale
 * @property {(position: number) => number} x 0 is the left edge, 1 the right one; may lie outside
 * @property {(x: number) => number} position the other way round
 * @property {number[]} domain first and last position that are seen
 * @property {(width: number) => number[]} ticks positions to be labelled
 */

/**
 * Make a scale. "linear": every token has the same width. "even": every piece between two partings is
 * wide enough to be seen, the wider the more tokens it has.
 * @param {"linear"|"even"} kind
 * @param {Iterable<{start: number, end: number}>} items
 * @param {[number, number]} domain positions that are seen
 * @returns {Scale}
 */
export function makeScale(kind, items, domain) {
  const [first, last] = domain[1] > domain[0] ? domain : [domain[0], domain[0] + 1];
  const base = kind === "even" ? evenScale(items) : d3.scaleLinear().domain([0, 1]).range([0, 1]);
  const [left, right] = [base(first), base(last)];
  const width = right - left || 1;
  const x = (position) => (base(position) - left) / width;
  return {
    domain: [first, last],
    x,
    position: (at) => base.invert(left + at * width),
    ticks(pixels) {
      const wanted = kind === "even" ? base.domain() : d3.ticks(first, last, Math.max(2, pixels / 90)).filter(Number.isInteger);
      return apart(wanted.filter((one) => one >= first && one <= last), x, 56 / Math.max(1, pixels));
    },
  };
}

function evenScale(items) {
  const cuts = new Set([0]);
  for (const { start, end } of items) cuts.add(start).add(end);
  const domain = [...cuts].sort((a, b) => a - b);
  if (domain.length < 2) domain.push(1);
  const range = [0];
  for (let at = 1; at < domain.length; at++) range.push(range[at - 1] + Math.log2(2 + domain[at] - domain[at - 1]));
  return d3.scaleLinear().domain(domain).range(range);
}

/** Leave out positions that are too near to the one before. */
function apart(positions, x, distance) {
  const kept = [];
  for (const one of positions) if (!kept.length || x(one) - x(kept.at(-1)) >= distance) kept.push(one);
  return kept;
}
