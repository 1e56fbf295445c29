/** Round numbers for scales. */

/**
 * Return round positions for marks on a scale.
 * @param {number} start
 * @param {number} stop
 * @param {number} wished number of marks
 */
export function ticks(start, stop, wished) {
  const span = Math.max(1e-9, stop - start);
  const raw = span / Math.max(1, wished);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw);
  const marks = [];
  for (let value = Math.ceil(start / step) * step; value <= stop + step * 1e-6; value += step) marks.push(value);
  return marks;
}
