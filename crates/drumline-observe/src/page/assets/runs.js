// What is known of the runs, and a card for each: its state, how far it is, and whether its curves are shown.

import { element, setText, setClass, setTitle, count, seconds } from "/words.js";

/** Lines of the log that are kept, as many as the server keeps. */
const MOST_LINES = 500;
const NUM_COLOURS = 8;
const STATES = new Map([
  ["waiting", "no events yet"], ["silent", "silent"], ["lost", "died without a word"],
]);

/** Puts what is new into what is known. */
export function apply(known, answer) {
  for (const news of answer.runs) {
    const run = known.get(news.id) ?? { id: news.id, colour: news.id % NUM_COLOURS, curves: new Map(), lines: [], shown: true };
    const { curves, log, ...facts } = news;
    Object.assign(run, facts, { changed: news.reset || curves.length > 0, now: answer.now });
    if (news.reset) run.curves.clear();
    for (const { name, phase, from, points } of curves) {
      const key = `${phase} ${name}`;
      const curve = run.curves.get(key) ?? { name, phase, points: [] };
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

/** The cards of all runs. `onSelect(id)`, `onShow()`: what a click asks for. */
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
    const marks = root.appendChild(element("p", "marks"));
    const trouble = root.appendChild(element("p", "trouble"));
    return { root, shown, name, state, progress, marks, trouble };
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
  setText(card.progress, progress(run));
  const marks = summary(run.ranks);
  if (card.marks.textContent !== marks.map(([, text]) => text).join("")) {
    card.marks.replaceChildren(...marks.map(([kind, text]) => element("span", `pill ${kind}`, text)));
  }
  const trouble = run.error ?? run.trouble ?? (run.num_left_out > 0 ? "more metrics than can be shown" : "");
  setText(card.trouble, trouble);
  card.trouble.hidden = !trouble;
}

function progress({ state, step, epoch, world_size: worldSize, num_nodes: numNodes, device, began, ended, now, folder }) {
  if (state === "waiting") return folder;
  const parts = [`epoch ${count(epoch)}`, `step ${count(step)}`];
  if (worldSize) parts.push(worldSize === 1 ? "1 rank" : `${count(worldSize)} ranks`);
  if (numNodes > 1) parts.push(`${count(numNodes)} nodes`);
  if (device) parts.push(device);
  const until = ended ?? (state === "running" ? now : null);
  if (began > 0 && until > began) parts.push(seconds(until - began));
  return parts.join("  ·  ");
}

/** What is out of the ordinary, as `[kind, text]`. */
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
