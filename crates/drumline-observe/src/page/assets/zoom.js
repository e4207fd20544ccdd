// Dragging over a chart selects a part of the x-axis; a double click shows all of it again.

import { shape } from "/elements.js";

/** A shorter drag is a click. In pixels. */
const SHORTEST = 6;

/** `area()`: where the plot is, `{x, y, width, height}`. `back(offset)`: the value of the axis there. */
export function makeZoomable(picture, view, { area, back }) {
  const band = picture.appendChild(shape("rect", { class: "chosen" }));
  let begin = null;
  const offset = (event) => {
    const { x, width } = area();
    const at = event.clientX - picture.getBoundingClientRect().left;
    return Math.min(Math.max(at, x), x + width);
  };
  const draw = (from, to) => {
    const { y, height } = area();
    const place = { x: Math.min(from, to), y, width: Math.abs(to - from), height };
    for (const [name, size] of Object.entries(place)) band.setAttribute(name, size);
  };
  const hide = () => band.setAttribute("width", 0);

  picture.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    begin = offset(event);
    if (event.isTrusted) picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    const at = event.clientX - picture.getBoundingClientRect().left;
    const { x, width } = area();
    view.point(at >= x && at <= x + width ? back(at) : null);
    if (begin !== null) draw(begin, offset(event));
  });
  picture.addEventListener("pointerup", (event) => {
    if (begin === null) return;
    const [from, to] = [begin, offset(event)].sort((a, b) => a - b);
    begin = null;
    hide();
    if (to - from >= SHORTEST) view.zoom([back(from), back(to)]);
  });
  picture.addEventListener("pointercancel", () => {
    begin = null;
    hide();
  });
  picture.addEventListener("pointerleave", () => view.point(null));
  picture.addEventListener("dblclick", () => view.zoom(null));
}
