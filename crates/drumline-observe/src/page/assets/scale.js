// From values to positions on a chart, and the positions of its grid lines.

/** Round numbers between two, about `wanted` of them. */
export function ticks(low, high, wanted) {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
  const first = Math.ceil(low / step);
  const last = Math.floor(high / step);
  // Each is computed from a whole number, so that 0.1 + 0.2 is 0.3.
  return Array.from({ length: last - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

/** Powers of ten between two, or round numbers if there are fewer than two. */
export function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low));
  const last = Math.floor(Math.log10(high));
  if (last - first < 1) return ticks(low, high, 4).filter((tick) => tick > 0);
  const apart = Math.ceil((last - first + 1) / 6);
  const powers = [];
  for (let power = first; power <= last; power += apart) powers.push(10 ** power);
  return powers;
}

/** Usual lengths of time, in seconds. */
const SPANS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];

/** Round times between two, about `wanted` of them, and how each is written. */
export function timeTicks(low, high, wanted) {
  const span = high - low;
  if (!(span > 0)) return [];
  const step = SPANS.find((size) => size >= span / wanted) ?? Math.ceil(span / wanted / 604800) * 604800;
  if (span / wanted < SPANS[0]) return ticks(low, high, wanted).map((at) => [at, `${at} s`]);
  const [first, last] = [Math.ceil(low / step), Math.floor(high / step)];
  const times = Array.from({ length: last - first + 1 }, (_, at) => (first + at) * step);
  return times.map((at) => [at, clock(at, step, high)]);
}

function clock(time, step, high) {
  const two = (number) => String(number).padStart(2, "0");
  const [minutes, hours] = [Math.floor(time / 60), Math.floor(time / 3600)];
  if (high < 120) return `${time} s`;
  if (step < 60) return `${hours > 0 ? `${hours}:${two(minutes % 60)}` : minutes}:${two(time % 60)}`;
  if (high < 7200) return `${minutes} min`;
  if (step < 3600) return `${hours}:${two(minutes % 60)} h`;
  if (high < 172800) return `${hours} h`;
  return hours % 24 === 0 ? `${hours / 24} d` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** The position of a value: `low` at `from`, `high` at `to`. */
export function scale({ low, high, from, to, log = false }) {
  const bend = log ? (value) => Math.log10(Math.max(value, low)) : (value) => value;
  const [start, span] = [bend(low), bend(high) - bend(low) || 1];
  const place = (value) => from + ((bend(value) - start) / span) * (to - from);
  place.back = (at) => low + ((at - from) / (to - from)) * (high - low);
  return place;
}

/** Exponential mean, correct from its first value on, weighted by samples, so that a small batch counts less; gaps stay gaps. */
export function smooth(points, weight) {
  const usual = points.reduce((most, point) => Math.max(most, point[5]), 1);
  let [sum, share] = [0, 0];
  return points.map((point) => {
    const [step, mean, least, greatest, time, samples] = point;
    if (mean === null) return point;
    const own = (1 - weight) * (samples / usual);
    sum = sum * weight + mean * own;
    share = share * weight + own;
    return [step, sum / share, least, greatest, time, samples];
  });
}

/** The index of the point that is nearest to a position, which grows along the points. */
export function nearest(points, place, of) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (of(points[middle]) < place) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && place - of(points[low - 1]) < of(points[low]) - place) return low - 1;
  return low;
}
