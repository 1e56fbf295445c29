// Libraries of others, which are loaded when something first needs them.

const loaded = new Map();

/**
 * Load a classic script of the folder `vendor`, once.
 * @param {string} path below `vendor`
 * @returns {Promise<void>}
 */
export function script(path) {
  return once(path, (url, done, failed) => {
    const node = document.createElement("script");
    node.src = url;
    node.onload = done;
    node.onerror = failed;
    return node;
  });
}

/** Load a style sheet of the folder `vendor`, once. */
export function sheet(path) {
  return once(path, (url, done, failed) => {
    const node = document.createElement("link");
    node.rel = "stylesheet";
    node.href = url;
    node.onload = done;
    node.onerror = failed;
    return node;
  });
}

function once(path, make) {
  const known = loaded.get(path);
  if (known) return known;
  const found = new Promise((resolve, reject) => {
    const url = new URL(`../vendor/${path}`, import.meta.url).href;
    document.head.append(make(url, () => resolve(undefined), () => reject(new Error(`${path} could not be loaded`))));
  });
  // A library that could not be had is asked for again next time.
  found.catch(() => loaded.delete(path));
  loaded.set(path, found);
  return found;
}
