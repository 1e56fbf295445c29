// The document of /v1/state/history as a tree of items, and the list of those that are to be seen.

/**
 * One row: a branch with the tokens that only it and what goes on from it have, or a run of tokens
 * that several branches share.
 * @typedef {object} Item
 * @property {string} id the branch's id, or "run:" and the node's
 * @property {string} kind the branch's kind, or "run"
 * @property {object|null} branch the branch's document
 * @property {number} start first position of its own tokens
 * @property {number} end one past the last
 * @property {string} head @property {string} tail texts of both ends
 * @property {object|null} key of a root: adapter and salt
 * @property {Item|null} parent
 * @property {Item[]} children
 * @property {number} below branches at and below it
 */

/**
 * @typedef {object} Row
 * @property {Item} item
 * @property {number} level 1 for roots
 * @property {number} setsize @property {number} posinset among what is to be seen beside it
 * @property {boolean} expandable @property {boolean} expanded
 * @property {boolean} matches whether the search found it, and not only what is around it
 * @property {{at: number, through: boolean}[]} rails lines of what it is within: position, and
 *   whether the line goes on below the row
 */

/**
 * @param {{branches: object[], nodes: object[]}} doc
 * @returns {{roots: Item[], items: Map<string, Item>, end: number, kinds: Map<string, number>}}
 */
export function buildTree(doc) {
  const branches = new Map(doc.branches.map((one) => [one.id, one]));
  const children = new Map();
  for (const node of doc.nodes) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  const tree = { roots: [], items: new Map(), end: 1, kinds: new Map() };
  for (const { kind } of doc.branches) tree.kinds.set(kind, (tree.kinds.get(kind) ?? 0) + 1);
  const waiting = (children.get(null) ?? []).map((node) => ({ node, parent: null, key: node.key ?? null }));
  waiting.reverse();
  while (waiting.length) {
    const { node, parent, key } = waiting.pop();
    const within = children.get(node.id) ?? [];
    tree.end = Math.max(tree.end, node.end);
    if (parent === null && node.start === node.end && !node.branches.length) {
      // Nothing is in the root itself: what is below stands for it.
      for (const child of [...within].reverse()) waiting.push({ node: child, parent: null, key });
      continue;
    }
    const item = add(tree, itemOf(node, branches, key), parent);
    for (const child of [...within].reverse()) waiting.push({ node: child, parent: item, key: null });
  }
  // Children were made behind their parents, so going backwards sums them up.
  for (const item of [...tree.items.values()].reverse()) {
    if (item.branch) item.below += 1;
    if (item.parent) item.parent.below += item.below;
  }
  return tree;

  function itemOf(node, found, key) {
    const ending = node.branches.map((id) => found.get(id)).filter(Boolean);
    const base = { start: node.start, end: node.end, head: node.head ?? "", tail: node.tail ?? "", key };
    if (ending.length === 1) return { ...base, id: ending[0].id, kind: ending[0].kind, branch: ending[0] };
    return { ...base, id: `run:${node.id}`, kind: "run", branch: null, ending };
  }

  function add(into, { ending = [], ...fields }, parent) {
    const item = { ...fields, parent, children: [], below: 0 };
    into.items.set(item.id, item);
    (parent ? parent.children : into.roots).push(item);
    for (const branch of ending) {
      const end = { start: item.end, end: item.end, head: "", tail: "", key: null };
      add(into, { ...end, id: branch.id, kind: branch.kind, branch }, item);
    }
    return item;
  }
}

/** Return the text by which an item is called. */
export function labelOf(item) {
  if (item.kind === "run") return item.parent ? "shared" : "beginning";
  return item.branch.name ?? item.id.slice(item.id.indexOf(":") + 1);
}

/**
 * Return the rows to be seen: what matches and all around it, without what is within closed items.
 * @param {{roots: Item[], items: Map<string, Item>}} tree
 * @param {{closed: Set<string>, query: string, kinds: Set<string>|null}} filter kinds: null is all;
 *   a search opens what is closed
 * @returns {Row[]}
 */
export function rowsOf(tree, { closed, query, kinds }) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const filtered = words.length > 0 || kinds !== null;
  const found = new Set();
  const around = new Set();
  if (filtered) {
    for (const item of tree.items.values()) {
      if (!matching(item, words, kinds)) continue;
      found.add(item);
      for (let one = item; one && !around.has(one); one = one.parent) around.add(one);
    }
  }
  const seen = (items) => (filtered ? items.filter((item) => around.has(item)) : items);
  const rows = [];
  const waiting = level(seen(tree.roots), 1, []);
  while (waiting.length) {
    const row = waiting.pop();
    rows.push(row);
    const below = seen(row.item.children);
    row.matches = !filtered || found.has(row.item);
    row.expandable = below.length > 0;
    row.expanded = row.expandable && (words.length > 0 || !closed.has(row.item.id));
    if (!row.expanded) continue;
    const rails = row.rails.filter((rail) => rail.through);
    waiting.push(...level(below, row.level + 1, rails, row.item.end));
  }
  return rows;
}

/** Return rows of items beside each other, the last one first. */
function level(items, depth, rails, at = null) {
  return items
    .map((item, index) => ({
      item,
      level: depth,
      setsize: items.length,
      posinset: index + 1,
      expandable: false,
      expanded: false,
      matches: true,
      rails: at === null ? rails : [...rails, { at, through: index < items.length - 1 }],
    }))
    .reverse();
}

function matching(item, words, kinds) {
  if (kinds !== null && !kinds.has(item.kind)) return false;
  if (!words.length) return item.kind !== "run" || kinds !== null;
  const { branch } = item;
  const text = `${labelOf(item)} ${item.id} ${branch?.adapter ?? ""} ${item.head} ${item.tail}`.toLowerCase();
  return words.every((word) => text.includes(word));
}
