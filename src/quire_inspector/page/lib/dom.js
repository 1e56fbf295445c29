// Making elements. Texts become text nodes; nothing here or elsewhere in the page parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const REFUSED_PROPS = new Set(["innerHTML", "outerHTML", "srcdoc", "insertAdjacentHTML"]);
const REFUSED_TAGS = new Set(["script", "iframe", "object", "embed", "style", "base"]);
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected", "open", "indeterminate", "tabIndex", "scrollTop"]);

/**
 * Make an element: `el("button", {class: "b", onclick: fn, "aria-label": "x"}, "text", otherElement)`.
 *
 * `tag` may have SVG's prefix ("svg:path") and classes ("div.card.wide"). Props: `class`; `style`, an
 * object of CSS properties; `dataset`, an object; `on...`, listeners; others are attributes, of which
 * null, undefined and false are left out. Children: nodes, strings, numbers, arrays of these, or null.
 * @param {string} tag
 * @param {Object<string, any>} [props]
 * @param {...any} children
 * @returns {any} the element
 * @throws {TypeError} for props or tags that would parse or run text
 */
export function el(tag, props = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const isSvg = name.startsWith("svg:");
  const plain = isSvg ? name.slice(4) : name;
  if (REFUSED_TAGS.has(plain.toLowerCase())) throw new TypeError(`el: a <${plain}> is not made here`);
  const node = isSvg ? document.createElementNS(SVG, plain) : document.createElement(plain);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(props ?? {})) setProp(node, key, value);
  append(node, children);
  return node;
}

/** Set one prop of `el` on an element that exists. */
export function setProp(node, key, value) {
  if (REFUSED_PROPS.has(key)) throw new TypeError(`el: ${key} would parse HTML; give text as a child`);
  if (key.startsWith("on")) {
    if (value == null) return;
    if (typeof value !== "function") throw new TypeError(`el: ${key} must be a function`);
    node.addEventListener(key.slice(2).toLowerCase(), value);
  } else if (key === "style") {
    if (typeof value !== "object") throw new TypeError("el: style must be an object of CSS properties");
    for (const [name, one] of Object.entries(value)) if (one != null) node.style.setProperty(name, String(one));
  } else if (key === "dataset") {
    Object.assign(node.dataset, value);
  } else if (key === "class") {
    const before = node.getAttribute("class");
    if (value) node.setAttribute("class", before ? `${before} ${value}` : value);
  } else if (PROPERTIES.has(key) && key in node) {
    node[key] = value;
  } else if (value === false || value == null) {
    node.removeAttribute(key);
  } else {
    if (/^(href|src|action|formaction|xlink:href)$/i.test(key) && /^\s*(javascript|data|vbscript):/i.test(String(value))) {
      throw new TypeError(`el: ${key} must not be code`);
    }
    node.setAttribute(key, value === true ? "" : String(value));
  }
}

/** Append nodes, texts, numbers and arrays of these. */
export function append(node, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child == null || child === false || child === true) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Replace what a node holds. */
export function fill(node, ...children) {
  node.replaceChildren();
  return append(node, ...children);
}

/** Paths of 16 x 16 icons, drawn with lines. */
const ICONS = {
  history: "M3 3v7a3 3 0 0 0 3 3h2M3 6h4a3 3 0 0 1 3 3v0M13 13h-2M13 9h-3M3 3h10",
  pages: "M2.5 2.5h4v4h-4zM9.5 2.5h4v4h-4zM2.5 9.5h4v4h-4zM9.5 9.5h4v4h-4z",
  time: "M2 4h6M5 8h9M3 12h5M11 4h3M11 12h3",
  token: "M2 13V9M6 13V3M10 13V7M14 13v-2",
  book: "M3 3.5c2-.8 3.7-.8 5 .5c1.3-1.3 3-1.3 5-.5v9c-2-.8-3.7-.8-5 .5c-1.3-1.3-3-1.3-5-.5zM8 4v9",
  chat: "M2.5 3.5h11v7.5h-6l-3 2.5v-2.5h-2zM5 6h6M5 8.5h4",
  copy: "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3",
  edit: "M3 13l.7-3L11 2.7l2.3 2.3L6 12.3zM9.5 4.2l2.3 2.3",
  again: "M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3",
  left: "M10 3L5 8l5 5",
  more: "M2.5 8a.5.5 0 1 0 1 0a.5.5 0 1 0-1 0M7.5 8a.5.5 0 1 0 1 0a.5.5 0 1 0-1 0M12.5 8a.5.5 0 1 0 1 0a.5.5 0 1 0-1 0",
  send: "M8 13.5v-11M3.5 7L8 2.5L12.5 7",
  attach: "M12.5 7.5l-5 5a3 3 0 0 1-4.3-4.3l5.5-5.4a2 2 0 0 1 2.9 2.8l-5.4 5.4a1 1 0 0 1-1.4-1.4l4.7-4.7",
  tree: "M4 2.5a1.5 1.5 0 1 0 .01 0M12 6a1.5 1.5 0 1 0 .01 0M4 10.5a1.5 1.5 0 1 0 .01 0M4 5.5v5M4 7.5h6.5",
  settings: "M2 4.5h7M12 4.5h2M2 11.5h2M7 11.5h7M10.5 2.8v3.4M5.5 9.8v3.4",
  list: "M2.5 4h11M2.5 8h11M2.5 12h11",
  pin: "M5.5 2.5h5l-.8 4.5l2.3 2.5H4l2.3-2.5zM8 9.5V14",
  download: "M8 2.5v7.5M4.5 7L8 10.5L11.5 7M3 13.5h10",
  upload: "M8 10.5V3M4.5 6L8 2.5L11.5 6M3 13.5h10",
  tag: "M2.5 2.5h5.5l5.5 5.5l-5.5 5.5l-5.5-5.5zM5.5 5.5h.01",
  check: "M3 8.5l3.5 3.5L13 4.5",
  warn: "M8 2.5l6 11H2zM8 6.5v3.5M8 12h.01",
  bulb: "M6 11.5c0-1.5-2-2.3-2-5a4 4 0 0 1 8 0c0 2.7-2 3.5-2 5zM6.3 13.8h3.4",
  tool: "M10.5 2.5a3.3 3.3 0 0 0-3 4.6L2.8 11.8l1.4 1.4l4.7-4.7a3.3 3.3 0 0 0 4.4-4.1l-2 2l-1.8-.5l-.5-1.8z",
  playground: "M2.5 3.5h11v7h-6l-3 2.5v-2.5h-2z",
  sun: "M8 5a3 3 0 1 0 0 6a3 3 0 1 0 0-6M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  moon: "M13 9.5A5.5 5.5 0 0 1 6.5 3a5.5 5.5 0 1 0 6.5 6.5z",
  key: "M10.5 2.5a3 3 0 1 0 0 6a3 3 0 1 0 0-6M8.3 7.7L2.5 13.5M4.5 11.5l1.5 1.5",
  help: "M5.5 6a2.5 2.5 0 1 1 3.6 2.2c-.8.4-1.1.8-1.1 1.8M8 12.7v.3",
  close: "M4 4l8 8M12 4l-8 8",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9M10.5 10.5L14 14",
  fork: "M4 2v12M4 6c0 3 7 2 7 5v3M2 4l2-2l2 2",
  rewind: "M7 4L3 8l4 4M3 8h7a3 3 0 0 1 0 6",
  compare: "M5 3v10M11 3v10M5 5H2M5 8H2M14 5h-3M14 8h-3",
  stop: "M4.5 4.5h7v7h-7z",
  play: "M5 3l8 5l-8 5z",
  plus: "M8 3v10M3 8h10",
  trash: "M3 4.5h10M6.5 4.5v-2h3v2M4.5 4.5l.5 9h6l.5-9",
  save: "M3 2.5h8l2.5 2.5v8.5H3zM5.5 2.5v4h4v-4M5 13.5v-4h6v4",
  right: "M6 3l5 5l-5 5",
  zoom: "M2 8h12M2 8l3-3M2 8l3 3M14 8l-3-3M14 8l-3 3",
  session: "M8 3a5 5 0 1 0 0 10a5 5 0 1 0 0-10",
  request: "M4 3l9 5l-9 5z",
  cached: "M8 2l6 6l-6 6l-6-6z",
  cache: "M3 3h10v10H3z",
  commit: "M8 2l5.2 3v6L8 14l-5.2-3V5z",
  run: "M2 8h12",
};
const FILLED = new Set(["session", "request", "cached", "cache", "commit", "stop", "play", "more"]);

/**
 * Make an icon, which screen readers skip. Names are those of `ICONS`; kinds of branches each have a
 * shape of their own, so that colour is never the only sign.
 * @param {string} name
 * @param {Object<string, any>} [props]
 */
export function icon(name, props = {}) {
  const filled = FILLED.has(name);
  return el(
    "svg:svg",
    { viewBox: "0 0 16 16", "aria-hidden": "true", focusable: "false", ...props, class: `icon ${props.class ?? ""}` },
    el("svg:path", {
      d: ICONS[name] ?? ICONS.run,
      fill: filled ? "currentColor" : "none",
      stroke: "currentColor",
      "stroke-width": "1.5",
      "stroke-linecap": "round",
      "stroke-linejoin": "round",
    }),
  );
}
