// What can be done at a token: rewind, fork, look at it, or go on with another token instead.

import { openDialog } from "../../lib/dialogs.js";
import { tokenWords } from "../../lib/tokens.js";

const ALTERNATIVES = 8;

/**
 * @param {object} app @param {import("./column.js").Column} column
 * @param {{position: number, id: number, text: string|null}} token @param {HTMLElement} node
 */
export function openTokenMenu(app, column, token, node) {
  const { el, icon, format } = app;
  const stop = new AbortController();
  const opened = openDialog(
    "Token",
    (close) => {
      const item = (name, text, does, hint = "") =>
        el("button.menu-item", { type: "button", onclick: () => (close(), does()) }, icon(name), el("span", {}, text), hint ? el("kbd", {}, hint) : null);
      const chance = el("p.hint", { role: "status" }, "Its probability is computed…");
      const others = el("div.menu-others");
      load(app, column, token, stop.signal).then(
        (found) => {
          chance.textContent = found.token
            ? `${format.share(found.token.probability)}, rank ${format.number(found.token.rank)} of ${format.number(found.vocab_size)}`
            : "Nothing comes before it.";
          const rest = found.alternatives.filter((one) => one.id !== token.id).slice(0, ALTERNATIVES);
          if (!rest.length) return;
          others.append(
            el("h3", {}, "Fork and go on with"),
            ...rest.map((one) =>
              el(
                "button.menu-item",
                { type: "button", onclick: () => (close(), column.forkWith(token.position, one)) },
                icon("fork"),
                el("code", {}, tokenWords(one)),
                el("span.meter", { "aria-hidden": "true" }, el("span", { style: { width: `${Math.max(0.5, one.probability * 100)}%` } })),
                el("span.share", {}, format.share(one.probability)),
              ),
            ),
          );
        },
        (error) => {
          if (!app.isAbort(error)) chance.textContent = error.message;
        },
      );
      const kept = token.position + 1;
      return el(
        "div.dialog-body.token-menu",
        {},
        el("p", {}, el("code.menu-token", {}, tokenWords(token)), el("span.hint", {}, ` position ${format.number(token.position)}, token ${token.id}`)),
        chance,
        el(
          "div",
          {},
          item("fork", "Fork here", () => column.fork(kept), "F"),
          item("rewind", "Rewind to here", () => column.rewind(kept), "R"),
          item("rewind", "Rewind to before it", () => column.rewind(token.position)),
          item("token", "Look at this token", () => app.go("token", { branch: `session:${column.id}`, position: token.position })),
        ),
        others,
      );
    },
    { class: "menu", anchor: node },
  );
  opened.then(() => stop.abort());
}

/** Return the document of a token, or only the token, where the server cannot tell more. */
function load(app, column, token, signal) {
  return app.get("v1/state/token", { branch: `session:${column.id}`, position: token.position }, { signal });
}
