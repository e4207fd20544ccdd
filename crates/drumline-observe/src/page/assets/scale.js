// From values to places on a chart, and where its lines stand.

/** Even numbers between two, about `wanted` of them. */
export function ticks(low, high, wanted) {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
  const first = Math.ceil(low / step);
  const last = Math.floor(high / step);
  // Each is made from a whole number, so that 0.1 + 0.2 is 0.3.
  return Array.from({ length: last - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

/** Powers of ten between two, or even numbers where there are less than two. */
export function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low));
  const last = Math.floor(Math.log10(high));
  if (last - first < 1) return ticks(low, high, 4).filter((tick) => tick > 0);
  const apart = Math.ceil((last - first + 1) / 6);
  const powers = [];
  for (let power = first; power <= last; power += apart) powers.push(10 ** power);
  return powers;
}

/** The place of a value: `low` at `from`, `high` at `to`. */
export function scale({ low, high, from, to, log = false }) {
  const bend = log ? (value) => Math.log10(Math.max(value, low)) : (value) => value;
  const [start, span] = [bend(low), bend(high) - bend(low) || 1];
  const place = (value) => from + ((bend(value) - start) / span) * (to - from);
  place.back = (at) => low + ((at - from) / (to - from)) * (high - low);
  return place;
}

/** Exponential mean, right from its first value on; gaps stay gaps. */
export function smooth(points, weight) {
  let [sum, share] = [0, 0];
  return points.map(([step, mean]) => {
    if (mean === null) return [step, null];
    sum = sum * weight + mean * (1 - weight);
    share = share * weight + (1 - weight);
    return [step, sum / share];
  });
}

/** The index of the point that is nearest to a step. */
export function nearest(points, step) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && step - points[low - 1][0] < points[low][0] - step) return low - 1;
  return low;
}
