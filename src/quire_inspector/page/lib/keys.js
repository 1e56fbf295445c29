// Keys: combinations within an element, and single keys for the whole page, which can be turned off.

const SETTING = "quire.keys";

/** Return "Shift+F", "Control+Enter", "ArrowDown" of an event. */
function combination(event) {
  const parts = [];
  if (event.ctrlKey || event.metaKey) parts.push("Control");
  if (event.altKey) parts.push("Alt");
  if (event.shiftKey && (event.key.length > 1 || /^[a-z]$/i.test(event.key))) parts.push("Shift");
  parts.push(event.key.length === 1 ? event.key.toUpperCase() : event.key);
  return parts.join("+");
}

/** Return whether the reader is writing, so that single keys are text. */
export function isWriting(event) {
  return event.target instanceof Element && !!event.target.closest("input:not([type=range],[type=checkbox],[type=radio]), textarea, select, [contenteditable]");
}

/**
 * Call functions on keys within an element. A function that returns false leaves the key to the browser.
 * @param {HTMLElement} node
 * @param {Object<string, (event: KeyboardEvent) => any>} table by "ArrowDown", "F", "Shift+F", "Control+Enter"
 * @param {AbortSignal} [signal] ends it
 */
export function keys(node, table, signal) {
  const found = new Map(Object.entries(table).map(([name, fn]) => [name.length === 1 ? name.toUpperCase() : name, fn]));
  const listener = (event) => {
    const fn = found.get(combination(event));
    if (!fn || event.defaultPrevented) return;
    const plain = event.key.length === 1 && !event.ctrlKey && !event.metaKey && !event.altKey;
    if (plain && isWriting(event)) return;
    if (fn(event) !== false) event.preventDefault();
  };
  node.addEventListener("keydown", listener, { signal });
  return () => node.removeEventListener("keydown", listener);
}

/** Whether single keys work anywhere on the page. */
export const singleKeys = {
  get on() {
    try {
      return localStorage.getItem(SETTING) !== "off";
    } catch {
      return true;
    }
  },
  set on(value) {
    try {
      localStorage.setItem(SETTING, value ? "on" : "off");
    } catch {
      // The choice then lasts as the default.
    }
  },
};
