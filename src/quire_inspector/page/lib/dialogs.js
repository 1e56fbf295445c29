// Dialogs: the browser's own <dialog>, which keeps the focus inside and gives it back.

import { append, el, icon } from "./dom.js";

let count = 0;

/**
 * Open a dialog. It closes with Escape, its close button, or `close(value)`.
 * @param {string} title
 * @param {(close: (value?: any) => void) => any} body makes the children
 * @param {{class?: string, anchor?: HTMLElement}} [options] anchor: what it is to stand beside, on
 *   screens with room
 * @returns {Promise<any>} the value it was closed with; undefined if it was given up
 */
export function openDialog(title, body, options = {}) {
  return new Promise((resolve) => {
    const id = `dialog-${(count += 1)}`;
    let result;
    const close = (value) => {
      result = value;
      dialog.close();
    };
    const closeButton = el("button.icon-button", { type: "button", "aria-label": "Close", onclick: () => close() }, icon("close"));
    const dialog = el(
      "dialog.dialog",
      { "aria-labelledby": id, class: options.class },
      el("header.dialog-head", {}, el("h2", { id }, title), closeButton),
    );
    append(dialog, body(close));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(result);
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) close();
    });
    document.body.append(dialog);
    dialog.showModal();
    if (options.anchor) stand(dialog, options.anchor);
    const first = dialog.querySelector("[autofocus], input, textarea, select, .dialog-actions .primary");
    (first ?? closeButton).focus();
  });
}

/** Put a dialog below an element, or above it where there is more room. */
function stand(dialog, anchor) {
  if (innerWidth < 600) return;
  const there = anchor.getBoundingClientRect();
  const own = dialog.getBoundingClientRect();
  const left = Math.max(8, Math.min(there.left, innerWidth - own.width - 8));
  const below = innerHeight - there.bottom > there.top;
  dialog.style.margin = "0";
  dialog.style.left = `${left}px`;
  dialog.style.right = "auto";
  dialog.style.top = below ? `${there.bottom + 6}px` : "auto";
  dialog.style.bottom = below ? "auto" : `${innerHeight - there.top + 6}px`;
  dialog.style.maxHeight = `${(below ? innerHeight - there.bottom : there.top) - 16}px`;
}

/**
 * Ask for one or more values. `check(values)` may return a sentence that says what is wrong, or a
 * promise of one; the dialog then stays open and says it.
 * @param {string} title
 * @param {{name: string, label: string, type?: string, value?: any, hint?: string, min?: number, max?: number, required?: boolean, autocomplete?: string}[]} fields
 * @param {{action?: string, text?: any, danger?: boolean, check?: (values: object) => any}} [options]
 * @returns {Promise<Object<string, string>|undefined>}
 */
export function ask(title, fields, { action = "OK", text = null, danger = false, check } = {}) {
  return openDialog(title, (close) => {
    const wrong = el("p.form-error", { role: "alert", hidden: true });
    const inputs = fields.map((field) => {
      const id = `field-${(count += 1)}`;
      const input = el("input.input", {
        id,
        name: field.name,
        type: field.type ?? "text",
        value: field.value ?? "",
        min: field.min,
        max: field.max,
        required: field.required,
        autocomplete: field.autocomplete ?? "off",
        spellcheck: "false",
        "aria-describedby": field.hint ? `${id}-hint` : null,
      });
      const hint = field.hint ? el("p.hint", { id: `${id}-hint` }, field.hint) : null;
      return { field, input, row: el("div.field", {}, el("label", { for: id }, field.label), input, hint) };
    });
    const go = el("button.button", { type: "submit", class: danger ? "danger" : "primary" }, action);
    const submit = async (event) => {
      event.preventDefault();
      const values = Object.fromEntries(inputs.map(({ field, input }) => [field.name, input.value]));
      wrong.hidden = true;
      go.disabled = true;
      let said;
      try {
        said = await check?.(values);
      } catch (error) {
        said = error.message;
      }
      go.disabled = false;
      if (!said) return close(values);
      wrong.textContent = said;
      wrong.hidden = false;
      (inputs[0]?.input ?? go).focus();
      inputs[0]?.input.select?.();
    };
    return el(
      "form",
      { onsubmit: submit, class: "dialog-body" },
      text === null ? null : el("p", {}, text),
      inputs.map(({ row }) => row),
      wrong,
      el(
        "div.dialog-actions",
        {},
        el("button.button", { type: "button", onclick: () => close() }, "Cancel"),
        go,
      ),
    );
  });
}

/** Ask before something is lost. Returns a promise of true or false. */
export async function confirmed(title, text, action) {
  return (await ask(title, [], { action, text, danger: true })) !== undefined;
}
