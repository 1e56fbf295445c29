// One branch along its positions: what it shares, what the pool holds, holes, checkpoints.

const WIDTH = 1000;
const LANE = 14;
const GAP = 6;

/**
 * Draw lanes over one axis: the runs of the tree, the rows that each pool holds, checkpoints.
 * @param {object} app @param {HTMLElement} place
 * @param {{item: object, at: number}} what
 */
export function drawPositions(app, place, { item, at }) {
  const { el, fill, format } = app;
  const end = Math.max(1, item.end);
  const x = (position) => (position / end) * WIDTH;
  const lanes = lanesOf(item, app.overview?.pools ?? []);
  const height = lanes.length * (LANE + GAP);
  const shapes = lanes.map(({ ranges, kind, marks }, index) => {
    const y = index * (LANE + GAP);
    return [
      el("svg:rect", { x: 0, y, width: WIDTH, height: LANE, class: "lane", rx: 2 }),
      ranges.map(([start, stop, shade]) =>
        el("svg:rect", { x: x(start), y, width: Math.max(1, x(Math.min(stop, end)) - x(start)), height: LANE, class: `range ${kind} ${shade ?? ""}` }),
      ),
      marks.map((one) => el("svg:path", { d: `M${x(one)} ${y}v${LANE}`, class: "mark", "vector-effect": "non-scaling-stroke" })),
    ];
  });
  const words = lanes.map(({ name, said }) => `${name}: ${said}`).join("; ");
  fill(
    place,
    el(
      "div.lanes",
      {},
      el("div.lane-names", { "aria-hidden": "true" }, lanes.map(({ name, said }) => el("span", { title: said }, name))),
      el(
        "svg:svg",
        { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": words, style: { height: `${height}px` } },
        shapes,
        el("svg:path", { d: `M${x(at)} 0V${height}`, class: "cursor", "vector-effect": "non-scaling-stroke" }),
      ),
    ),
    el("div.lane-ends", { "aria-hidden": "true" }, el("span", {}, "0"), el("span", {}, format.number(end))),
  );
}

/** Return what to draw: names, ranges [start, stop, shade], marks, and the same in words. */
function lanesOf(item, pools) {
  const lanes = [];
  const path = [];
  for (let one = item; one; one = one.parent) if (one.end > one.start) path.unshift(one);
  const runs = path.map((one, index) => [one.start, one.end, index % 2 ? "odd" : "even"]);
  const partings = path.slice(1).map((one) => one.start);
  lanes.push({
    name: "Tree",
    kind: "run",
    ranges: runs,
    marks: partings,
    said: partings.length ? `others part at ${some(partings)}` : "nothing parts before its end",
  });
  const { branch } = item;
  if (!branch) return lanes;
  for (const { pool, ranges } of branch.held) {
    const { layers = [], window = null } = pools[pool] ?? {};
    const held = ranges.reduce((sum, [start, stop]) => sum + stop - start, 0);
    const holes = branch.computed - held;
    lanes.push({
      name: branch.held.length > 1 ? `Pool ${pool}` : "Held",
      kind: "held",
      ranges,
      marks: [],
      said: `rows of ${held} tokens in ${layers.length} layers${window ? ` with a window of ${window}` : ""}${holes > 0 ? `, ${holes} let go` : ""}`,
    });
  }
  if (branch.checkpoints.length) {
    lanes.push({ name: "States", kind: "state", ranges: [], marks: branch.checkpoints, said: `recurrent states at ${some(branch.checkpoints)}` });
  }
  const far = branch.reachable.map(([start, stop]) => [start, Math.min(stop, item.end + 1)]).filter(([start, stop]) => stop > start);
  lanes.push({
    name: "Rewind",
    kind: "reach",
    ranges: far,
    marks: [],
    said: far.length ? `without running tokens again to ${some(far.map(([start, stop]) => `${start} to ${stop - 1}`))}` : "tokens are run again",
  });
  return lanes;
}

function some(list) {
  return list.length > 8 ? `${list.slice(0, 8).join(", ")} and ${list.length - 8} more` : list.join(", ");
}
