// The configuration of runs: a row for each key, a column for each run that is shown, and a mark where they differ.

import { element, setText } from "/elements.js";

/** More columns would be unreadable. */
const MOST_RUNS = 6;

export class Configuration {
  constructor(root) {
    this.root = root;
    this.filter = root.querySelector("#keys");
    this.onlyDiffering = root.querySelector("#differing");
    this.known = "";
    for (const input of [this.filter, this.onlyDiffering]) input.addEventListener("input", () => this.draw());
    root.addEventListener("toggle", () => this.draw());
  }

  /** Shows these runs, the selected one first. */
  show(runs, selected) {
    const withSetup = runs.filter((run) => run.setup && (run.shown || run.id === selected));
    withSetup.sort((a, b) => Number(b.id === selected) - Number(a.id === selected));
    this.runs = withSetup.slice(0, MOST_RUNS);
    this.root.hidden = this.runs.length === 0;
    const known = JSON.stringify(this.runs.map(({ id, name, device, setup }) => [id, name, device, setup]));
    if (known === this.known) return;
    this.known = known;
    this.draw();
  }

  draw() {
    if (!this.root.open || !this.runs) return;
    const isAlone = this.runs.length < 2;
    this.root.querySelector("#differing-label").hidden = isAlone;
    const head = element("tr");
    head.append(element("th", "", "key"), ...this.runs.map((run) => element("th", `c${run.colour}`, isAlone ? "value" : run.name)));
    const columns = this.runs.map(entries);
    const keys = [...new Set(columns.flatMap((column) => [...column.keys()]))];
    const wanted = this.filter.value.trim().toLowerCase();
    const rows = [];
    for (const key of keys) {
      const values = columns.map((column) => column.get(key) ?? "");
      const differs = values.some((value) => value !== values[0]);
      if (this.onlyDiffering.checked && !isAlone && !differs) continue;
      if (wanted && ![key, ...values].some((text) => text.toLowerCase().includes(wanted))) continue;
      const row = element("tr", differs ? "differs" : "");
      row.append(element("td", "", key), ...values.map((value) => element("td", "", value)));
      rows.push(row);
    }
    this.root.querySelector("thead").replaceChildren(head);
    this.root.querySelector("tbody").replaceChildren(...rows);
    setText(this.root.querySelector(".summary-of"), rows.length === 0 ? "no such key" : "");
  }
}

/** All that a run reports about itself, as texts. */
function entries({ setup, device, world_size: worldSize, num_nodes: numNodes }) {
  const { config, drumline, libtorch, seed, num_threads: numThreads } = setup;
  const own = { ranks: worldSize, nodes: numNodes, device, threads: numThreads, seed, drumline, libtorch };
  const known = Object.entries(own).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return new Map([...Object.entries(config), ...known].map(([key, value]) => [key, text(value)]));
}

function text(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
