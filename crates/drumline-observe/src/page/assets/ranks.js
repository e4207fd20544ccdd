// The table of ranks: one row each, and above it a strip with a square for each.

import { element, setText, setClass, setTitle, bytes, count, seconds } from "/elements.js";
import { summary } from "/runs.js";

const SHARES = ["load", "compute", "comm"];

export class Ranks {
  constructor(root) {
    this.root = root;
    this.body = root.querySelector("tbody");
    this.strip = root.querySelector("#strip");
    this.rows = [];
  }

  show(run, isAlone) {
    const ranks = run?.ranks ?? [];
    this.root.hidden = ranks.length === 0;
    for (const name of ["mesh", "bubble"]) {
      this.root.classList.toggle(`no-${name}`, ranks.every((rank) => (rank[name] ?? null) === null));
    }
    setText(this.root.querySelector(".of"), isAlone || !run ? "" : run.name);
    const conditions = summary(ranks).map(([, text]) => text).join(", ");
    setText(this.root.querySelector(".summary"), `${count(ranks.length)} in total${conditions && `: ${conditions}`}`);
    while (this.rows.length > ranks.length) this.remove();
    ranks.forEach((rank, index) => {
      this.rows[index] ??= this.add();
      fill(this.rows[index], rank);
    });
  }

  add() {
    const row = this.body.appendChild(element("tr"));
    const cell = (className) => row.appendChild(element("td", className));
    const cells = { rank: cell("number rank"), mesh: cell("mesh"), state: cell("state"), step: cell("number") };
    cells.waits = cell("waits").appendChild(element("div"));
    cells.shares = cell("shares");
    cells.bubble = cell("number bubble");
    for (const name of ["computed", "communicated", "speed", "memory", "peak"]) cells[name] = cell("number");
    cells.process = cell("process");
    const [pill, mark] = [element("span"), element("span", "pill straggler", "straggler")];
    cells.state.append(pill, mark);
    const bar = cells.shares.appendChild(element("div", "bar"));
    const parts = SHARES.map((name) => bar.appendChild(element("span", name)));
    const square = this.strip.appendChild(element("span"));
    square.addEventListener("click", () => row.scrollIntoView({ block: "center" }));
    return { row, cells, pill, mark, parts, square };
  }

  remove() {
    const { row, square } = this.rows.pop();
    row.remove();
    square.remove();
  }
}

function fill({ row, cells, pill, mark, parts, square }, rank) {
  const kind = rank.straggler ? `${rank.condition} straggler` : rank.condition;
  setClass(row, kind);
  setClass(square, kind);
  setTitle(square, `rank ${rank.rank}: ${rank.condition}`);
  setText(cells.rank, String(rank.rank));
  setText(cells.mesh, rank.mesh ?? "");
  setText(pill, rank.condition);
  setClass(pill, `pill ${rank.condition}`);
  mark.hidden = !rank.straggler;
  setText(cells.step, count(rank.step));
  const waits = waitsFor(rank);
  setText(cells.waits, waits);
  setTitle(cells.waits, rank.op ?? waits);
  rank.shares.forEach((share, index) => parts[index].style.setProperty("width", `${(share * 100).toFixed(1)}%`));
  setTitle(cells.shares, rank.shares.map((share, index) => `${SHARES[index]} ${(share * 100).toFixed(0)} %`).join(", "));
  setText(cells.bubble, Number.isFinite(rank.bubble) ? `${(rank.bubble * 100).toFixed(0)} %` : "");
  setText(cells.computed, seconds(rank.compute_s));
  setText(cells.communicated, seconds(rank.comm_s));
  setText(cells.speed, count(rank.samples_per_s ?? NaN));
  setText(cells.memory, bytes(rank.memory_bytes ?? NaN));
  setText(cells.peak, bytes(rank.peak_bytes ?? NaN));
  setText(cells.process, `${rank.host} · ${rank.pid}`);
}

function waitsFor({ condition, error, op, op_s: since, waits_for: others, straggler, silent_s: silent }) {
  if (condition === "failed") return error ?? "failed without an error message";
  if (condition === "lost") return `no sign of life for ${seconds(silent)}${op ? `; last in ${op}` : ""}`;
  if (straggler) return straggler;
  if (!op) return condition === "ended" ? "" : "–";
  const [call, place] = op.split(" at ", 2);
  const time = since >= 0.1 ? ` for ${seconds(since)}` : "";
  const who = others ? `, waits for ${others}` : "";
  return `${call.replace(/\(.*\)/, "")}${time}${who}${place ? ` (${place})` : ""}`;
}
