// How numbers are formatted, and how elements are made. Text is inserted into elements as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with a class and a text. */
export function element(tag, className = "", text = null) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== null) made.textContent = text;
  return made;
}

/** An element of a picture, with its attributes. */
export function shape(tag, attributes = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Changes a text only if it differs, so that the browser does not lay it out again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, className) {
  if (node.getAttribute("class") !== className) node.setAttribute("class", className);
}

export function setTitle(node, text) {
  if (node.title !== text) node.title = text;
}

const whole = new Intl.NumberFormat("en");

/** 12345 as 12,345. */
export function count(value) {
  return Number.isFinite(value) ? whole.format(Math.round(value)) : "–";
}

/** A value of a curve with about four digits. */
export function value(number) {
  if (!Number.isFinite(number)) return "–";
  const size = Math.abs(number);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return number.toExponential(2).replace(/\.?0*e\+?/, "e");
  if (size >= 1000) return whole.format(Math.round(number));
  return String(Number(number.toPrecision(4)));
}

/** Seconds as people write them. */
export function seconds(time) {
  if (!Number.isFinite(time)) return "–";
  if (time < 10) return `${time.toFixed(1)} s`;
  if (time < 120) return `${Math.round(time)} s`;
  if (time < 7200) return `${Math.floor(time / 60)} min`;
  if (time < 172800) return `${Math.floor(time / 3600)} h ${Math.floor((time % 3600) / 60)} min`;
  return `${Math.floor(time / 86400)} d ${Math.floor((time % 86400) / 3600)} h`;
}

/** Bytes in a suitable unit. */
export function bytes(size) {
  if (!Number.isFinite(size)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) [size, unit] = [size / 1024, unit + 1];
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}
