// The state of the page: what the server said, what the user chose and selected.
import { decimal, passes } from "./curves.js";

export const element = (id) => document.getElementById(id);
export const UNITS = { steps: "steps", tokens: "tokens", flops: "training FLOPs", seconds: "seconds in steps" };
export const SIGNS = { running: "●", finished: "✓", stopped: "■", diverged: "✕", failed: "✕", stuck: "▲" };
export const PAGE_ROWS = 100;
const CHOICES = { study: "", x: "steps", y: "", group: "", filter: "", smooth: 0, logx: false, logy: false };

export const board = { runs: [], constant: {}, metrics: [], labels: {}, studies: [], kinds: {}, folder: "" };
export const curves = new Map(); // id → {at, x, y, points}
export const selected = new Set();
export const choice = { ...CHOICES };
// order and limit: of the table of runs; lines: the coloured ones; at: x of the cursor or null.
export const view = { order: { name: "Run", down: false }, limit: PAGE_ROWS, lines: [], at: null, under: new Set() };

// The choices are also in the address, so that a view can be kept as a bookmark.
export function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  Object.assign(choice, CHOICES);
  for (const name of Object.keys(CHOICES)) {
    if (!said.has(name)) continue;
    const kind = typeof choice[name];
    choice[name] = kind === "boolean" ? said.get(name) === "1" : kind === "number" ? Number(said.get(name)) || 0 : said.get(name);
  }
}

export function writeAddress() {
  const said = new URLSearchParams();
  for (const name of Object.keys(CHOICES)) if (choice[name]) said.set(name, choice[name] === true ? "1" : choice[name]);
  history.replaceState(null, "", `#${said}`);
}

// A metric as readers name it, and a value of it.
export const label = (name) => board.labels[name]?.[0] ?? name.replaceAll("_", " ");
export const measured = (name, value) => (typeof value === "number" && board.labels[name]?.[1] ? `${(100 * value).toFixed(1)} %` : decimal(value));

// The runs that pass the filter.
export function visible() {
  const words = choice.filter.toLowerCase().split(/\s+/).filter(Boolean);
  return board.runs.filter((run) => passes(run, words, board.constant));
}

// The value of a recipe field of a run.
export const fieldOf = (run, name) => run.recipe[name] ?? board.constant[name];
