// Code in messages: coloured by highlight.js once that is there, with its language and a button that copies it.

import { script } from "../../lib/vendor.js";
import { save } from "./exchange.js";

/** Characters from which code stays without colours. */
const LONGEST = 60_000;
/** How files end, by the names of languages. */
const ENDS = { bash: "sh", c: "c", cpp: "cpp", "c++": "cpp", csharp: "cs", css: "css", csv: "csv", diff: "diff", go: "go", html: "html", java: "java", javascript: "js", js: "js", json: "json", jsx: "jsx", kotlin: "kt", latex: "tex", lua: "lua", markdown: "md", md: "md", php: "php", py: "py", python: "py", r: "r", ruby: "rb", rust: "rs", sh: "sh", shell: "sh", sql: "sql", svg: "svg", swift: "swift", toml: "toml", ts: "ts", tsx: "tsx", typescript: "ts", xml: "xml", yaml: "yaml", yml: "yml" };

/**
 * @param {object} app @param {string} text @param {string} language as the fence names it, or ""
 */
export function codeBlock(app, text, language) {
  const { el, icon } = app;
  const code = el("code", {}, text);
  const name = /^[\w+#.-]{1,30}/.exec(language)?.[0] ?? "";
  const saveButton = el("button.button.small", { type: "button", onclick: () => save(`code.${ENDS[name.toLowerCase()] ?? "txt"}`, [text], "text/plain") }, icon("download"), "Save");
  const copyButton = el("button.button.small.copy", { type: "button", onclick: () => copied(app, text, copyButton) }, icon("copy"), "Copy");
  if (name && text.length <= LONGEST) colour(app, code, text, name.toLowerCase());
  return el(
    "figure.code",
    { "aria-label": name ? `Code, ${name}` : "Code" },
    el("figcaption", {}, el("span", {}, name || "text"), el("span.code-does", {}, saveButton, copyButton)),
    el("pre", { tabindex: "0", dir: "ltr" }, code),
  );
}

/** Copy a text, and say so on the button that was pressed. */
export async function copied(app, text, button) {
  const done = await copy(text);
  app.announce(done ? "Copied" : "It could not be copied");
  if (!button) return;
  button.classList.add(done ? "done" : "wrong");
  setTimeout(() => button.classList.remove("done", "wrong"), 1500);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // A page that did not come over https, as on a phone in the same network, has no clipboard.
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "sr-only";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function colour(app, node, text, language) {
  const paint = () => {
    const { hljs } = globalThis;
    if (!hljs.getLanguage(language)) return;
    const found = hljs.highlight(text, { language, ignoreIllegals: true });
    app.fill(node, found._emitter.root.children.map((one) => spans(app, one)));
  };
  if (globalThis.hljs) paint();
  else script("highlight.min.js").then(paint, () => {});
}

/** Make elements of highlight.js' tree: texts, and scopes such as "title.function". */
function spans(app, node) {
  if (typeof node === "string") return node;
  const inner = node.children.map((one) => spans(app, one));
  const scope = /^[a-z-]+/.exec(node.scope ?? "")?.[0];
  return scope && scope !== "language" ? app.el("span", { class: `hl-${scope}` }, inner) : inner;
}
