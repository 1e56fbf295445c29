/**
 * The part of the time axis that is on the screen: zoomed, moved, or following the present. Times are
 * seconds.
 */

const SHORTEST = 0.002;
const LONGEST = 24 * 3600;

export class TimeWindow {
  /** @param {() => void} onChange called after each change */
  constructor(onChange) {
    this.onChange = onChange;
    this.span = 30;
    this.stop = 0;
    this.first = 0;
    this.now = 0;
    this.following = true;
  }

  get start() {
    return this.stop - this.span;
  }

  /**
   * Tell how far the data reach. The window moves along while it follows.
   * @param {number} first
   * @param {number} now
   */
  extent(first, now) {
    this.first = first;
    this.now = now;
    if (this.following) this.stop = now + 0.02 * this.span;
  }

  /**
   * Follow the present, or stop.
   * @param {boolean} following
   */
  follow(following) {
    this.following = following;
    if (following) this.stop = this.now + 0.02 * this.span;
    this.onChange();
  }

  /**
   * Zoom around a time that stays where it is.
   * @param {number} factor below 1 shows less
   * @param {number} around
   */
  zoom(factor, around) {
    const span = Math.min(LONGEST, Math.max(SHORTEST, this.span * factor));
    const share = (this.stop - around) / this.span;
    this.span = span;
    if (this.following) this.stop = this.now + 0.02 * span;
    else this.stop = this.clip(around + share * span);
    this.onChange();
  }

  /**
   * Move by seconds; stops following.
   * @param {number} seconds
   */
  pan(seconds) {
    this.following = false;
    this.stop = this.clip(this.stop + seconds);
    this.onChange();
  }

  /**
   * Show these times, with some room around.
   * @param {number} start
   * @param {number} stop
   */
  fit(start, stop) {
    this.following = false;
    this.span = Math.min(LONGEST, Math.max(SHORTEST, 1.1 * (stop - start)));
    this.stop = stop + 0.045 * this.span;
    this.onChange();
  }

  /** Keep some of the data in sight. */
  clip(stop) {
    return Math.min(this.now + 0.9 * this.span, Math.max(this.first + 0.1 * this.span, stop));
  }
}

/**
 * Connect wheel, drag, pinch and keys on an element with a window.
 * @param {HTMLElement} element
 * @param {TimeWindow} view
 * @param {object} geometry
 * @param {() => {left: number, width: number}} geometry.plot where the axis lies, in CSS pixels of the element
 * @param {() => boolean} geometry.scrolls whether the wheel alone scrolls lanes
 * @param {(event: PointerEvent) => void} geometry.onClick a press without a drag
 */
export function steer(element, view, { plot, scrolls, onClick }) {
  /** @type {Map<number, PointerEvent>} */
  const pointers = new Map();
  let travelled = 0;
  let pinch = 0;
  const timeAt = (clientX) => {
    const { left, width } = plot();
    const x = clientX - element.getBoundingClientRect().left - left;
    return view.start + (Math.min(width, Math.max(0, x)) / width) * view.span;
  };
  const seconds = (pixels) => (pixels / plot().width) * view.span;

  element.addEventListener(
    "wheel",
    (event) => {
      const across = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (event.ctrlKey || event.metaKey || (!scrolls() && !across && !event.shiftKey)) {
        view.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.005), timeAt(event.clientX));
      } else if (across || event.shiftKey) {
        view.pan(seconds(across ? event.deltaX : event.deltaY));
      } else return;
      event.preventDefault();
    },
    { passive: false },
  );
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    pointers.set(event.pointerId, event);
    travelled = 0;
    pinch = 0;
  });
  element.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (before === undefined) return;
    pointers.set(event.pointerId, event);
    if (pointers.size === 2) {
      const [one, two] = [...pointers.values()];
      const apart = Math.hypot(one.clientX - two.clientX, one.clientY - two.clientY);
      if (pinch > 0 && apart > 0) view.zoom(pinch / apart, timeAt((one.clientX + two.clientX) / 2));
      pinch = apart;
      travelled += 10;
      return;
    }
    const moved = event.clientX - before.clientX;
    travelled += Math.abs(moved) + Math.abs(event.clientY - before.clientY);
    if (travelled > 4) {
      if (!element.hasPointerCapture(event.pointerId)) element.setPointerCapture(event.pointerId);
      view.pan(-seconds(moved));
    }
  });
  const up = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    if (event.type === "pointerup" && travelled <= 4) onClick(event);
  };
  element.addEventListener("pointerup", up);
  element.addEventListener("pointercancel", up);
}

/**
 * Act on a key that moves or zooms the window; returns whether it did.
 * @param {KeyboardEvent} event
 * @param {TimeWindow} view
 */
export function steerByKey(event, view) {
  const middle = (view.start + view.stop) / 2;
  const step = event.shiftKey ? 0.5 : 0.1;
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  if (event.key === "ArrowLeft") view.pan(-step * view.span);
  else if (event.key === "ArrowRight") view.pan(step * view.span);
  else if (event.key === "+" || event.key === "=") view.zoom(1 / 1.5, middle);
  else if (event.key === "-") view.zoom(1.5, middle);
  else if (event.key === "0") view.fit(view.first, view.now);
  else if (event.key === "f") view.follow(true);
  else if (event.key === "p") view.follow(!view.following);
  else return false;
  event.preventDefault();
  return true;
}
