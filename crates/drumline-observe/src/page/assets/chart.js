// A chart of one metric: a line for each run, dashed where it comes from evaluations, and a legend with values.
//
// What is drawn where values were many: the mean as a line, and behind it a band from the least to the greatest. With
// smoothing the line is the smoothed mean, and the mean itself stands behind it; evaluations are few and are never
// smoothed, nor is what is chosen and not measured. Where a value is no number the line has a gap, and a red mark stands
// below.

import { element, shape, setText, setClass, setTitle, count, value } from "/words.js";
import { logTicks, nearest, scale, smooth, ticks } from "/scale.js";

const HEIGHT = 230;
const MARGIN = { left: 56, right: 24, top: 8, bottom: 24 };
const TITLES = new Map([["loss", "Loss"], ["lr", "Learning rate"], ["samples_per_s", "Samples per second"]]);
/** More points than this need no dots. */
const MOST_DOTS = 60;
/** Room for half of one. */
const DOT = 4;
const CHOSEN = "lr";

export class Chart {
  constructor(name) {
    this.name = name;
    this.log = false;
    this.series = [];
    this.cursor = null;
    this.root = element("article", "chart panel");
    const heading = this.root.appendChild(element("div", "heading"));
    setTitle(heading.appendChild(element("h2", "", TITLES.get(name) ?? name)), name);
    this.at = heading.appendChild(element("span", "of"));
    this.toggle = heading.appendChild(element("button", "toggle", "log"));
    this.toggle.type = "button";
    this.toggle.setAttribute("aria-pressed", "false");
    this.toggle.addEventListener("click", () => this.setLog(!this.log));
    this.picture = this.root.appendChild(shape("svg", { class: "picture", height: HEIGHT, role: "img" }));
    this.picture.setAttribute("aria-label", `curve of ${name}`);
    this.grid = this.picture.appendChild(shape("g", { class: "grid" }));
    // An inner picture cuts off what goes beyond its edges.
    this.plot = this.picture.appendChild(shape("svg", { class: "plot" }));
    this.line = this.picture.appendChild(shape("path", { class: "cursor" }));
    this.legend = this.root.appendChild(element("ul", "legend"));
    this.picture.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.picture.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  setLog(log) {
    this.log = log;
    this.toggle.setAttribute("aria-pressed", String(log));
    this.draw();
  }

  /** Shows these series: `{key, label, colour, phase, points}`. */
  show(series, smoothing) {
    const isSmooth = ({ phase }) => smoothing > 0 && phase === "step" && this.name !== CHOSEN;
    this.series = series.map((one) => ({ ...one, line: isSmooth(one) ? smooth(one.points, smoothing) : one.points }));
    this.root.dataset.points = String(series.reduce((sum, one) => sum + one.points.length, 0));
    this.draw();
  }

  draw() {
    const width = this.root.clientWidth - 2;
    if (width < 100) return;
    this.picture.setAttribute("width", width);
    const extent = this.extent();
    const right = width - MARGIN.right;
    this.x = scale({ low: extent.first, high: extent.last, from: DOT, to: right - MARGIN.left - DOT });
    const plotHeight = HEIGHT - MARGIN.top - MARGIN.bottom;
    this.y = scale({ low: extent.low, high: extent.high, from: plotHeight, to: 0, log: extent.log });
    const place = { x: MARGIN.left, y: MARGIN.top, width: right - MARGIN.left, height: plotHeight };
    for (const [name, size] of Object.entries(place)) this.plot.setAttribute(name, size);
    this.drawGrid(extent, place);
    this.plot.replaceChildren(...this.series.flatMap((one) => this.shapes(one, plotHeight)));
    this.drawLegend();
    this.drawCursor();
  }

  /** From the means alone: one outlier of a band shall not flatten the rest. */
  extent() {
    let [first, last, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { points } of this.series) {
      if (points.length === 0) continue;
      first = Math.min(first, points[0][0]);
      last = Math.max(last, points[points.length - 1][0]);
      for (const [, mean] of points) {
        if (mean === null || (this.log && mean <= 0)) continue;
        low = Math.min(low, mean);
        high = Math.max(high, mean);
      }
    }
    if (first > last) [first, last] = [0, 1];
    if (first === last) last = first + 1;
    const log = this.log && low > 0 && low <= high;
    if (low > high) [low, high] = [0, 1];
    if (log) return { first, last, low: low / 1.1, high: high * 1.1, log };
    // Speeds are compared by their heights, so they stand on zero.
    if (this.name === "samples_per_s" && low > 0) low = 0;
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return { first, last, low: low === 0 ? 0 : low - room, high: high + room, log };
  }

  drawGrid({ first, last, low, high, log }, { x, y, width, height }) {
    const parts = [];
    for (const tick of log ? logTicks(low, high) : ticks(low, high, 5)) {
      const at = y + this.y(tick);
      parts.push(shape("path", { d: `M${x} ${at.toFixed(1)}h${width}` }));
      parts.push(label(x - 8, at + 4, "end", value(tick)));
    }
    for (const tick of ticks(first, last, Math.max(2, width / 90))) {
      if (!Number.isInteger(tick)) continue;
      parts.push(label(x + this.x(tick), y + height + 17, "middle", count(tick)));
    }
    this.grid.replaceChildren(...parts);
  }

  shapes({ points, line, colour, phase }, height) {
    const parts = [];
    if (points.some(([, , least, greatest]) => least !== greatest)) {
      parts.push(shape("path", { class: `band c${colour}`, d: this.band(points) }));
    }
    if (line !== points) parts.push(shape("path", { class: `raw c${colour}`, d: this.path(points) }));
    parts.push(shape("path", { class: `line ${phase} c${colour}`, d: this.path(line) }));
    if (points.length <= (phase === "eval" ? MOST_DOTS : 1)) {
      for (const [step, mean] of line) {
        if (mean === null) continue;
        parts.push(shape("circle", { class: `dot c${colour}`, cx: this.x(step), cy: this.y(mean), r: DOT - 1 }));
      }
    }
    const gaps = points.filter(([, mean]) => mean === null);
    if (gaps.length > 0) {
      const marks = gaps.map(([step]) => `M${this.x(step).toFixed(1)} ${height}v-7`).join("");
      parts.push(shape("path", { class: "missing", d: marks }));
    }
    return parts;
  }

  path(points) {
    let [text, pen] = ["", "M"];
    for (const [step, mean] of points) {
      if (mean === null) {
        pen = "M";
        continue;
      }
      text += `${pen}${this.x(step).toFixed(1)} ${this.y(mean).toFixed(1)}`;
      pen = "L";
    }
    return text;
  }

  band(points) {
    const whole = points.filter(([, , least, greatest]) => Number.isFinite(least) && Number.isFinite(greatest) && least !== null);
    const above = whole.map(([step, , , greatest]) => `${this.x(step).toFixed(1)} ${this.y(greatest).toFixed(1)}`);
    const below = whole.map(([step, , least]) => `${this.x(step).toFixed(1)} ${this.y(least).toFixed(1)}`);
    return `M${above.join("L")}L${below.reverse().join("L")}Z`;
  }

  point(offset) {
    this.cursor = offset === null || !this.x ? null : this.x.back(offset - MARGIN.left);
    this.drawLegend();
    this.drawCursor();
  }

  drawCursor() {
    const isIn = this.cursor !== null && this.x(this.cursor) >= 0;
    const at = isIn ? MARGIN.left + this.x(this.cursor) : 0;
    this.line.setAttribute("d", isIn ? `M${at.toFixed(1)} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}` : "");
    setText(this.at, isIn ? `step ${count(this.cursor)}` : "");
  }

  /** The last values, or those below the pointer. */
  drawLegend() {
    while (this.legend.children.length > this.series.length) this.legend.lastChild.remove();
    this.series.forEach(({ label: name, colour, phase, points }, index) => {
      const item = this.legend.children[index] ?? this.legend.appendChild(legendItem());
      setClass(item, `c${colour} ${phase}`);
      setText(item.children[1], phase === "eval" ? `${name} (evaluation)` : name);
      setTitle(item, name);
      const at = this.cursor === null ? points.length - 1 : nearest(points, this.cursor);
      const mean = points[at]?.[1];
      setText(item.children[2], mean === null ? "not a number" : value(mean));
      setClass(item.children[2], mean === null ? "value bad" : "value");
    });
  }
}

function legendItem() {
  const item = element("li");
  item.append(...["swatch", "name", "value"].map((name) => element("span", name)));
  return item;
}

function label(x, y, anchor, text) {
  const made = shape("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor });
  made.textContent = text;
  return made;
}
