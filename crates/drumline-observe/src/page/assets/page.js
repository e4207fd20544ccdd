// The page: asks once a second what is new and shows it.

import { element, setClass, setText } from "/elements.js";
import { Cards, apply } from "/runs.js";
import { Chart } from "/chart.js";
import { Configuration } from "/config.js";
import { Detail } from "/detail.js";
import { Ranks } from "/ranks.js";
import { View } from "/view.js";

const PERIOD = 1000;
/** A network disk may be slow. */
const TIMEOUT = 30000;
const MOST_LINES = 500;

const byId = (id) => document.getElementById(id);
const runs = new Map();
const charts = new Map();
const view = new View({ onZoom: zoomed, onPoint: pointed });
const detail = new Detail(view, showCharts);
const ranks = new Ranks(byId("ranks"));
const configuration = new Configuration(byId("config"));
const cards = new Cards(byId("runs"), { onSelect: select, onShow: showCharts });
let version = 0;
let selected = null;
let logOf = null;
let isPolling = false;

/** One request at a time, or what is new would come twice. */
async function poll() {
  if (isPolling) return;
  isPolling = true;
  let answer;
  try {
    const reply = await fetch(`/update?since=${version}`, { signal: AbortSignal.timeout(TIMEOUT) });
    if (!reply.ok) throw new Error(await reply.text());
    answer = await reply.json();
  } catch (error) {
    link("gone", version === 0 ? error.message : "drumline watch has ended or cannot be reached: the page shows the last known state");
    return;
  } finally {
    isPolling = false;
  }
  version = answer.version;
  apply(runs, answer);
  show(answer);
  link("live", "live");
}

/** Polls again and again, but not while the page is hidden. */
async function follow() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((resolve) => setTimeout(resolve, PERIOD));
  }
}

function link(kind, text) {
  setClass(byId("link"), kind);
  setText(byId("link"), text);
}

function show(answer) {
  notice(answer);
  if (selected === null && runs.size > 0) {
    selected = ([...runs.values()].find((run) => run.state === "running") ?? runs.values().next().value).id;
  }
  cards.show(runs, selected);
  if ([...runs.values()].some((run) => run.changed)) {
    detail.refresh(shownRuns());
    showCharts();
  }
  showSelected();
  const running = [...runs.values()].filter((run) => run.state === "running").length;
  document.title = running > 0 ? `${running} running – Drumline` : "Drumline";
}

function notice(answer) {
  const none = answer.all_running ? "You have no running job on this machine. Start one, and it appears here." : "";
  const text = answer.trouble ?? (runs.size === 0 ? none : "");
  setText(byId("notice"), text);
  byId("notice").hidden = !text;
}

function select(id) {
  selected = id;
  cards.show(runs, selected);
  showSelected();
}

function showSelected() {
  const run = runs.get(selected);
  ranks.show(run, runs.size === 1);
  configuration.show([...runs.values()], selected);
  showLog(run);
}

/** The loss first, the speed last, the program's metrics between them. */
function order(name) {
  const place = ["loss", "", "lr", "samples_per_s"].indexOf(name);
  return `${place < 0 ? 1 : place} ${name}`;
}

function shownRuns() {
  return [...runs.values()].filter((run) => run.shown);
}

function showCharts() {
  const shown = shownRuns();
  const names = new Set([...runs.values()].flatMap((run) => [...run.curves.values()].map((curve) => curve.name)));
  const smoothing = Number(byId("smoothing").value);
  setText(byId("smoothing-value"), smoothing.toFixed(2));
  const sorted = [...names].sort((a, b) => (order(a) < order(b) ? -1 : 1));
  showAxis(shown);
  for (const name of sorted) {
    if (!charts.has(name)) charts.set(name, new Chart(name, view));
    const series = shown.flatMap((run) => seriesOf(run, name));
    charts.get(name).show(series, smoothing);
  }
  const roots = sorted.map((name) => charts.get(name).root);
  const isUnchanged = roots.length === byId("charts").children.length && roots.every((root, at) => root === byId("charts").children[at]);
  if (!isUnchanged) byId("charts").replaceChildren(...roots);
  for (const name of [...charts.keys()].filter((name) => !names.has(name))) charts.delete(name);
}

/** The same x-axis for all charts; by time only if runs report when their steps ended. */
function showAxis(shown) {
  const lists = shown.flatMap((run) => [...run.curves.values()].map((curve) => curve.points));
  const hasTimes = lists.some((points) => points.length > 0 && points[points.length - 1][4] !== null);
  byId("by-time").disabled = !hasTimes;
  if (!hasTimes && lists.length > 0 && view.isTime) view.setAxis("step");
  view.fit(lists);
  byId("by-step").setAttribute("aria-pressed", String(!view.isTime));
  byId("by-time").setAttribute("aria-pressed", String(view.isTime));
  byId("unzoom").hidden = view.range === null;
}

function zoomed() {
  detail.fetch(shownRuns());
  showCharts();
}

function pointed() {
  for (const chart of charts.values()) {
    chart.drawLegend();
    chart.drawCursor();
  }
}

function seriesOf(run, name) {
  const curves = [...run.curves.entries()].filter(([, curve]) => curve.name === name);
  curves.sort(([, a], [, b]) => (a.phase < b.phase ? 1 : -1));
  return curves.map(([key, { phase, points, recent }]) => {
    return { label: run.name, colour: run.colour, phase, recent, points: detail.points(run, key) ?? points };
  });
}

/** Adds new lines, and stays at the end unless the user has scrolled up. */
function showLog(run) {
  const [section, box] = [byId("log"), byId("lines")];
  section.hidden = !run || run.lines.length === 0;
  if (!run) return;
  setText(section.querySelector(".of"), runs.size === 1 ? "" : run.name);
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  const isNew = logOf !== run.id || run.logReset;
  logOf = run.id;
  if (isNew) box.replaceChildren();
  const lines = isNew ? run.lines : run.newLines;
  run.newLines = [];
  box.append(...lines.map((line) => element("div", level(line), line || " ")));
  while (box.children.length > MOST_LINES) box.firstChild.remove();
  if (isNew || isAtEnd) box.scrollTop = box.scrollHeight;
}

function level(line) {
  const mark = line.match(/\b(ERROR|WARN|WARNING|error:|panicked)\b/)?.[1];
  if (!mark) return "";
  return mark.startsWith("WARN") ? "warn" : "error";
}

byId("smoothing").addEventListener("input", showCharts);
byId("by-step").addEventListener("click", () => view.setAxis("step"));
byId("by-time").addEventListener("click", () => view.setAxis("time"));
byId("unzoom").addEventListener("click", () => view.zoom(null));
document.addEventListener("keydown", (event) => event.key === "Escape" && view.range && view.zoom(null));
document.addEventListener("visibilitychange", () => document.hidden || poll());
follow();
