/**
 * Pictures of pages, written into pixels at once: a grid of 10,000 pages is a few milliseconds of
 * array writes instead of 10,000 drawing calls.
 *
 * @typedef {import("./inks.js").Ink} Ink
 * @typedef {{ink: Ink, edge?: Ink, pattern?: "plain" | "hollow" | "hatched" | "dotted"}} Tile
 */

/** Sizes of a page's square in CSS pixels, with its gap. */
const SIZES = [24, 22, 20, 18, 16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2];

/**
 * Choose the grid of a pool: the largest squares with which all pages fit, down to 2 pixels.
 * @param {number} pages
 * @param {number} width CSS pixels
 * @param {number} height CSS pixels that are wished for; a grid of the smallest squares may be higher
 * @returns {{size: number, columns: number, rows: number}}
 */
export function gridOf(pages, width, height) {
  const count = Math.max(1, pages);
  for (const size of SIZES) {
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(count / columns);
    if (rows * size <= height || size === SIZES[SIZES.length - 1]) {
      return { size, columns: Math.min(columns, count), rows };
    }
  }
  throw new Error("unreachable");
}

/** Pack a colour as the canvas's bytes stand in a little-endian word. */
function word(ink, alpha = 255) {
  return ((alpha << 24) | (ink[2] << 16) | (ink[1] << 8) | ink[0]) >>> 0;
}

/**
 * Make one page's picture: a square of `side` device pixels, of which the last `gap` columns and rows
 * stay empty.
 * @param {Tile} tile
 * @param {number} side
 * @param {number} gap
 */
function picture(tile, side, gap) {
  const pixels = new Uint32Array(side * side);
  const inner = side - gap;
  const body = word(tile.ink);
  const edge = word(tile.edge ?? tile.ink);
  const pattern = tile.pattern ?? "plain";
  const stripe = Math.max(3, Math.round(side / 4));
  const dot = Math.max(1, Math.round(inner / 4));
  for (let y = 0; y < inner; y += 1) {
    for (let x = 0; x < inner; x += 1) {
      const border = x === 0 || y === 0 || x === inner - 1 || y === inner - 1;
      let value = body;
      if (pattern === "hollow") value = border && inner > 3 ? edge : body;
      else if (pattern === "hatched") value = (x + y) % stripe < stripe / 2 ? edge : body;
      else if (pattern === "dotted" && inner >= 5) {
        const dx = 2 * x + 1 - inner;
        const dy = 2 * y + 1 - inner;
        value = dx * dx + dy * dy <= dot * dot ? edge : body;
      }
      pixels[y * side + x] = value;
    }
  }
  return pixels;
}

/**
 * Paint all pages of a pool.
 * @param {CanvasRenderingContext2D | OffscreenCanvasRenderingContext2D} context of a canvas of the grid's size
 * @param {{columns: number, rows: number, side: number, gap: number, count: number}} grid in device pixels
 * @param {Int32Array | Uint32Array} kinds each page's index into `tiles`
 * @param {Tile[]} tiles
 */
export function paintTiles(context, grid, kinds, tiles) {
  const { columns, rows, side, gap, count } = grid;
  const width = columns * side;
  const image = context.createImageData(width, rows * side);
  const out = new Uint32Array(image.data.buffer);
  const pictures = tiles.map((tile) => picture(tile, side, gap));
  for (let page = 0; page < count; page += 1) {
    const pixels = pictures[kinds[page]];
    const row = Math.floor(page / columns);
    let target = row * side * width + (page - row * columns) * side;
    let source = 0;
    for (let y = 0; y < side; y += 1) {
      for (let x = 0; x < side; x += 1) out[target + x] = pixels[source + x];
      target += width;
      source += side;
    }
  }
  context.putImageData(image, 0, 0);
}
