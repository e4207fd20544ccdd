// A chart of one metric: a line for each run, dashed for evaluations, and a legend with values.
//
// If a point represents many values, the mean is a line, and behind it is a band from the least to the greatest. With
// smoothing the line is the smoothed mean, and the mean itself is drawn behind it. Evaluations are few and are never smoothed,
// nor is the learning rate, which is chosen and not measured. Where a value is no number the line has a gap, with a red mark
// below. All charts share the x-axis, the part of it that is shown and the pointer: `view`.

import { element, shape, setText, setClass, setTitle, count, seconds, value } from "/elements.js";
import { logTicks, nearest, scale, smooth, ticks, timeTicks } from "/scale.js";
import { makeZoomable } from "/zoom.js";

const HEIGHT = 230;
const MARGIN = { left: 56, right: 24, top: 8, bottom: 24 };
const TITLES = new Map([["loss", "Loss"], ["lr", "Learning rate"], ["samples_per_s", "Samples per second"]]);
/** Curves with more points than this have no dots. */
const MOST_DOTS = 60;
/** Half the width of a dot. */
const DOT = 4;
const CHOSEN = "lr";

export class Chart {
  constructor(name, view) {
    this.name = name;
    this.view = view;
    this.log = false;
    this.series = [];
    this.area = { x: 0, y: 0, width: 0, height: 0 };
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
    // An inner picture clips what goes beyond its edges.
    this.plot = this.picture.appendChild(shape("svg", { class: "plot" }));
    this.line = this.picture.appendChild(shape("path", { class: "cursor" }));
    this.legend = this.root.appendChild(element("ul", "legend"));
    makeZoomable(this.picture, view, { area: () => this.area, back: (at) => this.x.back(at - MARGIN.left) });
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  setLog(log) {
    this.log = log;
    this.toggle.setAttribute("aria-pressed", String(log));
    this.draw();
  }

  /** Shows these series: `{label, colour, phase, recent, points}`. */
  show(series, smoothing) {
    const isSmooth = ({ phase }) => smoothing > 0 && phase === "step" && this.name !== CHOSEN;
    this.series = series.map((one) => {
      const points = this.view.placed(one.points);
      return { ...one, points, line: isSmooth(one) ? smooth(points, smoothing) : points };
    });
    this.root.dataset.points = String(series.reduce((sum, one) => sum + one.points.length, 0));
    this.draw();
  }

  draw() {
    const width = this.root.clientWidth - 2;
    if (width < 100) return;
    this.picture.setAttribute("width", width);
    this.area = { x: MARGIN.left, y: MARGIN.top, width: width - MARGIN.right - MARGIN.left, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    const [first, last] = this.view.domain;
    this.x = scale({ low: first, high: last, from: DOT, to: this.area.width - DOT });
    const seen = this.series.map((one) => ({ ...one, points: this.within(one.points), line: this.within(one.line) }));
    const extent = this.extent(seen);
    this.y = scale({ low: extent.low, high: extent.high, from: this.area.height, to: 0, log: extent.log });
    for (const [name, size] of Object.entries(this.area)) this.plot.setAttribute(name, size);
    this.drawGrid(extent);
    this.plot.replaceChildren(...seen.flatMap((one) => this.shapes(one, this.area.height)));
    this.drawLegend();
    this.drawCursor();
  }

  /** The points that are visible, and one more on each side, so that lines lead out of the picture. */
  within(points) {
    if (!this.view.range || points.length === 0) return points;
    const [from, to] = this.view.domain.map((x) => nearest(points, x, (point) => this.view.x(point)));
    return points.slice(Math.max(from - 1, 0), to + 2);
  }

  /** From the means alone: one outlier of a band must not flatten the rest. */
  extent(seen) {
    let [low, high] = [Infinity, -Infinity];
    for (const { points } of seen) {
      for (const [, mean] of points) {
        if (mean === null || (this.log && mean <= 0)) continue;
        low = Math.min(low, mean);
        high = Math.max(high, mean);
      }
    }
    const log = this.log && low > 0 && low <= high;
    if (low > high) [low, high] = [0, 1];
    if (log) return { low: low / 1.1, high: high * 1.1, log };
    // Speeds are compared by their heights, so the axis begins at zero.
    if (this.name === "samples_per_s" && low > 0) low = 0;
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return { low: low === 0 ? 0 : low - room, high: high + room, log };
  }

  drawGrid({ low, high, log }) {
    const { x, y, width, height } = this.area;
    const parts = [];
    for (const tick of log ? logTicks(low, high) : ticks(low, high, 5)) {
      const at = y + this.y(tick);
      parts.push(shape("path", { d: `M${x} ${at.toFixed(1)}h${width}` }));
      parts.push(label(x - 8, at + 4, "end", value(tick)));
    }
    for (const [tick, text] of this.ticks(width)) {
      parts.push(label(x + this.x(tick), y + height + 17, "middle", text));
    }
    this.grid.replaceChildren(...parts);
  }

  /** Positions on the x-axis with their texts. */
  ticks(width) {
    const [[first, last], wanted] = [this.view.domain, Math.max(2, width / 90)];
    if (this.view.isTime) return timeTicks(first, last, wanted);
    return ticks(first, last, wanted).filter(Number.isInteger).map((tick) => [tick, count(tick)]);
  }

  shapes({ points, line, colour, phase }, height) {
    const parts = [];
    if (points.some(([, , least, greatest]) => least !== greatest)) {
      parts.push(shape("path", { class: `band c${colour}`, d: this.band(points) }));
    }
    if (line !== points) parts.push(shape("path", { class: `raw c${colour}`, d: this.path(points) }));
    parts.push(shape("path", { class: `line ${phase} c${colour}`, d: this.path(line) }));
    if (points.length <= (phase === "eval" ? MOST_DOTS : 1)) {
      for (const point of line) {
        if (point[1] === null) continue;
        parts.push(shape("circle", { class: `dot c${colour}`, cx: this.place(point), cy: this.y(point[1]), r: DOT - 1 }));
      }
    }
    const gaps = points.filter(([, mean]) => mean === null);
    if (gaps.length > 0) {
      const marks = gaps.map((point) => `M${this.place(point)} ${height}v-7`).join("");
      parts.push(shape("path", { class: "missing", d: marks }));
    }
    return parts;
  }

  place(point) {
    return this.x(this.view.x(point)).toFixed(1);
  }

  path(points) {
    let [text, pen] = ["", "M"];
    for (const point of points) {
      if (point[1] === null) {
        pen = "M";
        continue;
      }
      text += `${pen}${this.place(point)} ${this.y(point[1]).toFixed(1)}`;
      pen = "L";
    }
    return text;
  }

  band(points) {
    const whole = points.filter(([, , least, greatest]) => Number.isFinite(least) && Number.isFinite(greatest) && least !== null);
    const above = whole.map((point) => `${this.place(point)} ${this.y(point[3]).toFixed(1)}`);
    const below = whole.map((point) => `${this.place(point)} ${this.y(point[2]).toFixed(1)}`);
    return `M${above.join("L")}L${below.reverse().join("L")}Z`;
  }

  drawCursor() {
    const { cursor, isTime } = this.view;
    const isIn = cursor !== null && this.x && this.x(cursor) >= 0 && this.x(cursor) <= this.area.width;
    const at = isIn ? MARGIN.left + this.x(cursor) : 0;
    this.line.setAttribute("d", isIn ? `M${at.toFixed(1)} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}` : "");
    setText(this.at, !isIn ? "" : isTime ? `after ${seconds(cursor)}` : `step ${count(cursor)}`);
  }

  /** The values at the pointer, or the current ones. */
  drawLegend() {
    while (this.legend.children.length > this.series.length) this.legend.lastChild.remove();
    this.series.forEach(({ label: name, colour, phase, points, recent }, index) => {
      const item = this.legend.children[index] ?? this.legend.appendChild(legendItem());
      setClass(item, `c${colour} ${phase}`);
      setText(item.children[1], phase === "eval" ? `${name} (evaluation)` : name);
      const isNow = this.view.cursor === null;
      setTitle(item, isNow && phase === "step" && this.name !== CHOSEN ? `${name}: the last 20 steps, weighted by their samples` : name);
      const at = isNow ? points.length - 1 : nearest(points, this.view.cursor, (point) => this.view.x(point));
      const mean = points[at]?.[1];
      const shown = isNow && mean !== null ? (recent ?? mean) : mean;
      setText(item.children[2], shown === null ? "not a number" : value(shown));
      setClass(item.children[2], shown === null ? "value bad" : "value");
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
