// Small things that columns need.

/** Wait for some milliseconds. */
export const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** Return where ids begin at the end of tokens; null if these end otherwise. What ended a generation
 * is not in the session, so up to two ids may be missing at the end. */
export function endsWith(tokens, ids) {
  for (let dropped = 0; dropped <= Math.min(2, ids.length); dropped++) {
    const from = tokens.length - (ids.length - dropped);
    if (from >= 0 && tokens.slice(from).every((token, index) => token.id === ids[index])) return from;
  }
  return null;
}

/** "draft" -> "draft 2" -> "draft 3". */
export function nextName(name) {
  const [, stem, number] = /^(.*?)(?: (\d{1,6}))?$/s.exec(name);
  return `${stem} ${Number(number ?? 1) + 1}`;
}

/** Return a name that a branch can have: "draft 1" -> "draft-1". */
export const branchNamed = (name) => name.replace(/[^A-Za-z0-9_-]+/g, "-").replace(/^-+|-+$/g, "");
