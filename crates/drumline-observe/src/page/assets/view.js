// What all charts share: the x-axis, which part of it is shown, and where the pointer is.

import { nearest } from "/scale.js";

const STEP = 0;
const TIME = 4;

export class View {
  /** `onZoom()`: another axis or part is shown. `onPoint()`: the pointer has moved. */
  constructor({ onZoom, onPoint }) {
    this.axis = "step";
    this.extent = [0, 1];
    this.range = null;
    this.cursor = null;
    this.onZoom = onZoom;
    this.onPoint = onPoint;
  }

  get isTime() {
    return this.axis === "time";
  }

  /** The x-value of a point `[step, mean, least, greatest, seconds, samples]`; null if it is not known. */
  x(point) {
    return point[this.isTime ? TIME : STEP];
  }

  /** The points that have a position on this axis. */
  placed(points) {
    return this.isTime && points.some((point) => point[TIME] === null) ? points.filter((point) => point[TIME] !== null) : points;
  }

  /** The visible part of the axis. */
  get domain() {
    return this.range ?? this.extent;
  }

  /** Fits the axis to all of these points, from the first to the last. */
  fit(lists) {
    let [first, last] = [Infinity, -Infinity];
    for (const points of lists) {
      const placed = this.placed(points);
      if (placed.length === 0) continue;
      first = Math.min(first, this.x(placed[0]));
      last = Math.max(last, this.x(placed[placed.length - 1]));
    }
    if (first > last) [first, last] = [0, 1];
    this.extent = [first, first === last ? first + 1 : last];
  }

  setAxis(axis) {
    if (axis === this.axis) return;
    this.axis = axis;
    this.range = null;
    this.cursor = null;
    this.onZoom();
  }

  zoom(range) {
    this.range = range && range[1] > range[0] ? range : null;
    this.onZoom();
  }

  point(x) {
    this.cursor = x;
    this.onPoint();
  }

  /** The steps of a curve in the visible part, with one more on each side. */
  steps(points) {
    const placed = this.placed(points);
    if (placed.length === 0) return null;
    const [from, to] = this.domain.map((x) => nearest(placed, x, (point) => this.x(point)));
    return [placed[Math.max(from - 1, 0)][STEP], placed[Math.min(to + 1, placed.length - 1)][STEP]];
  }
}
