/**
 * Colours for canvases: the theme's own, read once for each drawing, and one for each branch. A colour
 * is `[red, green, blue]`, each 0 to 255.
 *
 * @typedef {[number, number, number]} Ink
 */

import { color } from "../lib/color.js";

const GOLDEN_ANGLE = 137.508;
/** Shares of a page's colour by its number of owners: 1, 2, 3 to 4, 5 to 8, 9 and more. */
export const STRENGTHS = [0.48, 0.64, 0.78, 0.89, 1];
export const STRENGTH_NAMES = ["1", "2", "3–4", "5–8", "9+"];

/**
 * Convert a colour of OKLCH to sRGB, clipped.
 * @param {number} lightness 0 to 1
 * @param {number} chroma 0 to about 0.3
 * @param {number} hue degrees
 * @returns {Ink}
 */
export function oklch(lightness, chroma, hue) {
  const angle = (hue * Math.PI) / 180;
  const a = chroma * Math.cos(angle);
  const b = chroma * Math.sin(angle);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((value) => {
    const clipped = Math.min(1, Math.max(0, value));
    const shown = clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055;
    return Math.round(255 * shown);
  });
}

/**
 * Mix two colours.
 * @param {Ink} from
 * @param {Ink} to
 * @param {number} share of `to`, 0 to 1
 * @returns {Ink}
 */
export function mix(from, to, share) {
  return [0, 1, 2].map((i) => Math.round(from[i] + (to[i] - from[i]) * share));
}

/**
 * Write a colour for CSS or a canvas.
 * @param {Ink} ink
 * @param {number} [alpha]
 */
export function css(ink, alpha = 1) {
  return alpha === 1 ? `rgb(${ink.join(" ")})` : `rgb(${ink.join(" ")} / ${alpha})`;
}

/**
 * Return which of the five strengths a number of owners has: 0 to 4.
 * @param {number} owners at least 1
 */
export function strengthOf(owners) {
  return owners <= 2 ? Math.max(0, owners - 1) : owners <= 4 ? 2 : owners <= 8 ? 3 : 4;
}

/**
 * Tint a colour by its number of owners.
 * @param {Ink} ink
 * @param {Ink} ground what lies behind
 * @param {number} strength 0 to 4
 */
export function tint(ink, ground, strength) {
  return mix(ground, ink, STRENGTHS[strength]);
}

/**
 * Return black or white, whichever is easier to read on a colour.
 * @param {Ink} ground
 */
export function readableOn(ground) {
  const [red, green, blue] = ground.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

/** Read the theme that holds now. */
export function readTheme() {
  const ground = color.rgb("--surface");
  const text = color.rgb("--text");
  const dark = ground[0] + ground[1] + ground[2] < 384;
  const lightness = dark ? 0.74 : 0.6;
  return {
    dark,
    ground,
    text,
    muted: color.rgb("--muted"),
    line: color.rgb("--border"),
    accent: color.rgb("--accent"),
    owners: color.OWNERS.map((_, code) => color.rgb(`--owner-${color.OWNERS[code]}`)),
    other: mix(ground, text, 0.35),
    eviction: oklch(dark ? 0.7 : 0.57, 0.2, 27),
    phases: {
      waiting: mix(ground, text, 0.45),
      loading: oklch(lightness, 0.12, 200),
      prefill: oklch(lightness, 0.14, 262),
      decode: oklch(lightness + 0.04, 0.15, 152),
      preempted: oklch(lightness, 0.17, 50),
    },
    font: getComputedStyle(document.body).fontFamily,
  };
}

/**
 * Colours of branches: each gets the next hue when it is seen first, and keeps it while the page is
 * open.
 */
export class BranchInks {
  constructor() {
    /** @type {Map<string, number>} */
    this.places = new Map();
  }

  /**
   * Return a branch's colour.
   * @param {string} id
   * @param {boolean} dark the theme
   * @returns {Ink}
   */
  ink(id, dark) {
    let place = this.places.get(id);
    if (place === undefined) this.places.set(id, (place = this.places.size));
    const step = Math.floor(place / 16) % 3;
    return oklch((dark ? 0.8 : 0.62) - 0.07 * step, 0.135, 250 + place * GOLDEN_ANGLE);
  }
}

/** The colours of branches, shared by all views. */
export const branchInks = new BranchInks();
