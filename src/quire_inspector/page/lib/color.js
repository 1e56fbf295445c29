// Colours. style.css has them for both themes; canvases read here what they resolve to.

const cache = new Map();
let probe = null;

/** Return the CSS colour of a custom property ("--kind-session") in the present theme, as "rgb(...)". */
function get(name) {
  const found = cache.get(name);
  if (found) return found;
  if (!probe) {
    probe = document.createElement("span");
    probe.hidden = true;
    document.body.append(probe);
  }
  probe.style.color = `var(${name})`;
  const value = getComputedStyle(probe).color;
  cache.set(name, value);
  return value;
}

/** Return [red, green, blue], 0 to 255, of a custom property. */
function rgb(name) {
  return (get(name).match(/[\d.]+/g) ?? [0, 0, 0]).slice(0, 3).map(Number);
}

const OWNERS = ["free", "evictable", "held", "pinned"];
const KINDS = ["session", "request", "cached", "cache", "commit"];
const SERIES = 8;

/**
 * Colour scales that differ in lightness as well as hue, so that colour-blind people tell them apart.
 * They change with the theme: draw again on the event "theme".
 */
export const color = Object.freeze({
  KINDS,
  OWNERS,
  get,
  rgb,
  /** Colour of a kind of branch: session, request, cached, cache, commit; others are grey. */
  kind: (kind) => get(KINDS.includes(kind) ? `--kind-${kind}` : "--kind-other"),
  /** Colour of a page by its owner's code: 0 free, 1 evictable, 2 held, 3 pinned. */
  owner: (code) => get(`--owner-${OWNERS[code] ?? "held"}`),
  /** Colour of the n-th line of a plot. */
  series: (index) => get(`--series-${(((index % SERIES) + SERIES) % SERIES) + 1}`),
  /** Mix two custom properties: share 0 is the first, 1 the second. */
  mix(first, second, share) {
    const [a, b] = [rgb(first), rgb(second)];
    const part = Math.min(1, Math.max(0, share));
    return `rgb(${a.map((value, at) => Math.round(value + (b[at] - value) * part)).join(",")})`;
  },
  /** Colour of a value from 0 to 1 on one scale, from the background up to the accent. */
  heat: (share) => color.mix("--surface-2", "--heat", share),
});

/** Forget resolved colours; the theme has changed. */
export function forgetColors() {
  cache.clear();
}
