// Mathematics in messages: where it begins and ends, and KaTeX, loaded with the first formula.

import { script, sheet } from "../../lib/vendor.js";

/** Longest formula that is set; longer ones stay text. */
const LONGEST = 8000;
const PAIRS = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];

/** Teach a markdown-it parser `$a$`, `$$a$$`, `\(a\)` and `\[a\]`. Its tokens are `math`, whose `meta` says whether it is displayed. */
export function mathRules(parser) {
  parser.inline.ruler.before("escape", "math", inline);
  parser.block.ruler.before("fence", "math", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

function inline(state, silent) {
  const { src, pos } = state;
  const pair = PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return false;
  const [open, close, displayed] = pair;
  const start = pos + open.length;
  const end = src.indexOf(close, start);
  if (end < 0 || end === start || end >= state.posMax) return false;
  const tex = src.slice(start, end);
  // "$5 and $6" is no formula.
  if (open === "$" && (/^\s|\s$|\n\n/.test(tex) || /^\d/.test(src.slice(end + 1)) || src[end - 1] === "\\")) return false;
  if (!silent) push(state, tex, displayed);
  state.pos = end + close.length;
  return true;
}

function block(state, startLine, endLine, silent) {
  const start = state.bMarks[startLine] + state.tShift[startLine];
  const pair = PAIRS.find(([open, , displayed]) => displayed && state.src.startsWith(open, start));
  if (!pair) return false;
  const [open, close] = pair;
  const end = state.src.indexOf(close, start + open.length);
  if (end < 0) return false;
  let line = startLine;
  while (line < endLine && state.eMarks[line] < end) line += 1;
  const behind = state.src.slice(end + close.length, state.eMarks[line]).trim();
  if (line >= endLine || behind) return false;
  if (silent) return true;
  const token = push(state, state.src.slice(start + open.length, end), true);
  token.map = [startLine, line + 1];
  state.line = line + 1;
  return true;
}

function push(state, tex, displayed) {
  const token = state.push("math", "math", 0);
  token.content = tex.trim();
  token.meta = { displayed };
  return token;
}

/**
 * Return an element with a formula: its text until KaTeX is there, and for good where KaTeX cannot read it.
 * @param {object} app @param {string} tex @param {boolean} displayed
 */
export function formula(app, tex, displayed) {
  const node = app.el(displayed ? "div.math.displayed" : "span.math", {}, app.el("code", {}, tex));
  if (tex.length > LONGEST) return node;
  if (globalThis.katex) set(node, tex, displayed);
  else Promise.all([script("katex/katex.min.js"), sheet("katex/katex.min.css")]).then(() => set(node, tex, displayed), () => {});
  return node;
}

function set(node, tex, displayed) {
  try {
    const tree = globalThis.katex.__renderToDomTree(tex, { displayMode: displayed, throwOnError: true, strict: "ignore", trust: false, maxExpand: 300, maxSize: 20 });
    styleless(tree);
    const made = tree.toNode();
    // The page's policy forbids style attributes, not styles that a script sets.
    for (const svg of made.querySelectorAll("svg[data-width]")) svg.style.width = svg.dataset.width;
    node.replaceChildren(made);
  } catch (error) {
    node.title = String(error?.message ?? error).slice(0, 300);
    node.classList.add("wrong");
  }
}

/** Replace the style attributes of KaTeX's drawings, each a width, by data. */
function styleless(node) {
  const { attributes, children = [] } = node;
  if (attributes?.style) {
    attributes["data-width"] = attributes.style.replace(/^width:/, "");
    delete attributes.style;
  }
  for (const child of children) styleless(child);
}
