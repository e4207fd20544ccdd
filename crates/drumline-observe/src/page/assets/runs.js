// What is known about the runs, and a card for each: its state, its progress, and whether its curves are shown.

import { element, setText, setClass, setTitle, count, seconds, value } from "/elements.js";

/** Lines of the log that are kept, as many as on the server. */
const MOST_LINES = 500;
const NUM_COLOURS = 8;
const STATES = new Map([
  ["waiting", "no events yet"], ["silent", "silent"], ["lost", "died without a report"],
]);

/** Merges what is new into what is known. */
export function apply(known, answer) {
  for (const news of answer.runs) {
    const run = known.get(news.id) ?? { id: news.id, colour: news.id % NUM_COLOURS, curves: new Map(), lines: [], shown: true };
    const { curves, log, setup, ...facts } = news;
    if (setup) run.setup = setup;
    Object.assign(run, facts, { changed: news.reset || curves.length > 0, now: answer.now });
    if (news.reset) run.curves.clear();
    for (const { name, phase, from, points, recent, stride } of curves) {
      const key = `${phase} ${name}`;
      const curve = run.curves.get(key) ?? { name, phase, points: [] };
      Object.assign(curve, { recent, stride });
      curve.points.length = Math.min(curve.points.length, from);
      for (const point of points) curve.points.push(point);
      run.curves.set(key, curve);
    }
    if (log.reset) run.lines = [];
    run.newLines = log.lines;
    run.logReset = log.reset;
    run.lines.push(...log.lines);
    run.lines.splice(0, run.lines.length - MOST_LINES);
    known.set(news.id, run);
  }
}

/** The cards of all runs. `onSelect(id)` and `onShow()` are called on clicks. */
export class Cards {
  constructor(root, { onSelect, onShow }) {
    this.root = root;
    this.onSelect = onSelect;
    this.onShow = onShow;
    this.cards = new Map();
  }

  show(runs, selected) {
    for (const run of runs.values()) {
      const card = this.cards.get(run.id) ?? this.make(run);
      this.cards.set(run.id, card);
      fill(card, run, { isSelected: run.id === selected, isAlone: runs.size === 1 });
    }
  }

  make(run) {
    const root = this.root.appendChild(element("article"));
    const head = root.appendChild(element("div", "head"));
    const shown = head.appendChild(element("input", "shown"));
    shown.type = "checkbox";
    shown.checked = true;
    shown.title = "in the charts";
    shown.addEventListener("click", (event) => event.stopPropagation());
    shown.addEventListener("change", () => {
      run.shown = shown.checked;
      this.onShow();
    });
    const name = head.appendChild(element("button", "name"));
    name.type = "button";
    root.addEventListener("click", () => this.onSelect(run.id));
    const state = head.appendChild(element("span"));
    const progress = root.appendChild(element("p", "progress"));
    const bar = root.appendChild(element("div", "done"));
    const done = bar.appendChild(element("span"));
    const times = root.appendChild(element("p", "progress times"));
    const marks = root.appendChild(element("p", "marks"));
    const trouble = root.appendChild(element("p", "trouble"));
    const csv = head.appendChild(element("a", "toggle", "CSV"));
    csv.href = `/metrics.csv?run=${run.id}`;
    csv.download = "";
    csv.title = "all steps and evaluations, as a table";
    csv.addEventListener("click", (event) => event.stopPropagation());
    return { root, shown, name, state, progress, bar, done, times, marks, trouble, csv };
  }
}

function fill(card, run, { isSelected, isAlone }) {
  setClass(card.root, `run panel c${run.colour}${isSelected && !isAlone ? " selected" : ""}`);
  card.root.dataset.state = run.state;
  card.shown.hidden = isAlone;
  setText(card.name, run.name);
  setTitle(card.name, run.folder);
  setText(card.state, STATES.get(run.state) ?? run.state);
  setClass(card.state, `pill ${run.state}`);
  setParts(card.progress, progress(run));
  setParts(card.times, times(run));
  const part = run.total_steps > 0 ? Math.min(run.step / run.total_steps, 1) : null;
  card.bar.hidden = part === null;
  card.done.style.setProperty("width", `${((part ?? 0) * 100).toFixed(1)}%`);
  card.csv.hidden = run.curves.size === 0;
  const marks = summary(run.ranks);
  if (card.marks.textContent !== marks.map(([, text]) => text).join("")) {
    card.marks.replaceChildren(...marks.map(([kind, text]) => element("span", `pill ${kind}`, text)));
  }
  const trouble = run.error ?? run.trouble ?? (run.num_left_out > 0 ? "more metrics than can be shown" : "");
  setText(card.trouble, trouble);
  card.trouble.hidden = !trouble;
}

/** Several texts next to each other, none of them broken. */
function setParts(node, parts) {
  while (node.children.length > parts.length) node.lastChild.remove();
  parts.forEach((part, index) => setText(node.children[index] ?? node.appendChild(element("span")), part));
}

/** Epoch and step as in the log, and the ranks. */
function progress(run) {
  if (run.state === "waiting") return [`waiting for ${run.folder}`];
  const { step, epoch, epochs, world_size: worldSize, num_nodes: numNodes, device } = run;
  const parts = [`epoch ${of(epoch + 1, epochs)}`];
  const total = run.total_steps === null ? "" : ` of ${count(run.total_steps)}`;
  if (run.step_in_epoch !== null) {
    parts.push(`step ${of(run.step_in_epoch, run.steps_per_epoch)}`, `${count(step)}${total} in total`);
  } else {
    parts.push(`step ${count(step)}${total}`);
  }
  if (worldSize) parts.push(worldSize === 1 ? "1 rank" : `${count(worldSize)} ranks`);
  if (numNodes > 1) parts.push(`${count(numNodes)} nodes`);
  if (device) parts.push(device);
  return parts;
}

function of(number, total) {
  return total !== null && number <= total ? `${count(number)}/${count(total)}` : count(number);
}

/** How long it has worked and will work, its speed, and its best evaluation. */
function times(run) {
  const { elapsed_s: elapsed, left_s: left, state, best } = run;
  const parts = [];
  if (elapsed !== null) parts.push(`${state === "running" ? "running for" : "ran for"} ${seconds(elapsed)}`);
  if (left !== null && elapsed !== null && state === "running") {
    parts.push(`ETA ${seconds(left)}, ${seconds(elapsed + left)} in total`);
  }
  const speed = run.curves.get("step samples_per_s")?.recent;
  if (Number.isFinite(speed)) parts.push(`${count(speed)} samples/s`);
  if (best) parts.push(`best ${best.name} ${value(best.value)} (epoch ${count(best.epoch)})`);
  return parts;
}

/** What is unusual, as `[kind, text]`. */
export function summary(ranks) {
  const number = (test) => ranks.filter(test).length;
  const marks = [
    ["failed", number((rank) => rank.condition === "failed"), "failed"],
    ["lost", number((rank) => rank.condition === "lost"), "lost"],
    ["waiting", number((rank) => rank.condition === "waiting"), "waiting"],
    ["straggler", number((rank) => rank.straggler), "straggling"],
  ];
  return marks.filter(([, size]) => size > 0).map(([kind, size, word]) => [kind, `${size} ${word}`]);
}
