// The zoomed part of the curves in full resolution: the curves of a long run have few points.

/** While the run's end is visible, it is fetched again after this many milliseconds. */
const PERIOD = 3000;

export class Detail {
  /** `onArrival()`: there are finer points. */
  constructor(view, onArrival) {
    this.view = view;
    this.onArrival = onArrival;
    this.known = new Map();
    this.asked = 0;
    this.time = 0;
  }

  /** The finer points of a run's curve, if there are any for the visible part. */
  points(run, key) {
    return this.view.range ? this.known.get(run.id)?.get(key) : undefined;
  }

  /** Fetches the visible part; what was known is of another part. */
  fetch(runs) {
    this.known.clear();
    this.asked += 1;
    this.ask(runs);
  }

  /** Fetches again if the visible part still grows. */
  refresh(runs) {
    const isOpen = this.view.range !== null && this.view.range[1] >= this.view.extent[1];
    if (isOpen && Date.now() - this.time > PERIOD) this.ask(runs);
  }

  ask(runs) {
    if (this.view.range === null) return;
    this.time = Date.now();
    const asked = this.asked;
    for (const run of runs) {
      const coarse = [...run.curves.values()].filter((curve) => curve.stride > 1);
      const steps = coarse.map((curve) => this.view.steps(curve.points)).filter((range) => range !== null);
      if (steps.length === 0) continue;
      const from = Math.min(...steps.map(([first]) => first));
      const to = Math.max(...steps.map(([, last]) => last));
      this.take(run, `/detail?run=${run.id}&from=${from}&to=${to}`, asked);
    }
  }

  async take(run, address, asked) {
    let curves;
    try {
      const reply = await fetch(address);
      if (!reply.ok) return;
      curves = await reply.json();
    } catch {
      // The coarse curve stays; the page's status shows whether the server answers.
      return;
    }
    if (asked !== this.asked) return;
    this.known.set(run.id, new Map(curves.map(({ name, phase, points }) => [`${phase} ${name}`, points])));
    this.onArrival();
  }
}
