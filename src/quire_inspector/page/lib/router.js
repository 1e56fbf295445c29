// Where the reader is: `#view?name=value`, so that a reload, a bookmark and "back" keep it.

/**
 * @param {string} hash
 * @returns {{view: string, params: Object<string, string>}}
 */
export function readHash(hash) {
  const [view, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { view, params: Object.fromEntries(new URLSearchParams(query)) };
}

/** Return the hash of a view and its parameters; null, undefined and "" are left out. */
export function writeHash(view, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#${view}${query ? `?${query}` : ""}`;
}
