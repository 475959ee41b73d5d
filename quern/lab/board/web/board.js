// The board: asks the server for runs and for the points it does not have yet, and shows them. What comes from files
// reaches the page through textContent, never as markup.
import { MOST_LINES, duration, fieldText, groupLine, groupOf, number, passes, smoothed, valueAt } from "./curves.js";
import { Plot, swatchClass } from "./plot.js";
import { renderTable, sorted, whisker } from "./tables.js";

const element = (id) => document.getElementById(id);
const POLL_SECONDS = 2, PAGE_ROWS = 100, SINGLE_LINES = 8, MOST_POINTS = 1000, ALL_POINTS = 32000;
const CHOICES = ["study", "x", "y", "group", "filter", "smooth", "logx", "logy"];
const UNITS = { steps: "steps", tokens: "tokens", flops: "training FLOPs", seconds: "seconds in steps" };
const SIGNS = { running: "●", finished: "✓", stopped: "■", diverged: "✕", stuck: "▲" };

const board = { runs: [], constant: {}, metrics: [], studies: [], folder: "" };
const curves = new Map(); // id → {at, x, y, points}
const selected = new Set();
let choice = { study: "", x: "steps", y: "", group: "", filter: "", smooth: 0, logx: false, logy: false };
let order = { name: "Run", down: false };
let limit = PAGE_ROWS;
let lines = [];
let live = true;

// Choices: in the controls, and in the address so that a view can be kept as a bookmark ----------------------

function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  for (const name of CHOICES) {
    if (!said.has(name)) continue;
    const kind = typeof choice[name];
    choice[name] = kind === "boolean" ? said.get(name) === "1" : kind === "number" ? Number(said.get(name)) || 0 : said.get(name);
  }
}

function writeAddress() {
  const said = new URLSearchParams();
  for (const name of CHOICES) if (choice[name]) said.set(name, choice[name] === true ? "1" : choice[name]);
  history.replaceState(null, "", `#${said}`);
}

function fillSelect(select, options, value) {
  const shape = JSON.stringify(options);
  if (select.dataset.shape !== shape) {
    select.dataset.shape = shape;
    select.replaceChildren(...options.map(([key, text]) => {
      const option = document.createElement("option");
      option.value = key;
      option.textContent = text;
      return option;
    }));
  }
  select.value = value;
}

function showControls() {
  const { metrics, runs, studies } = board;
  if (!metrics.includes(choice.y) && metrics.length) choice.y = metrics.includes("val_bpb") ? "val_bpb" : metrics.includes("loss") ? "loss" : metrics[0];
  fillSelect(element("y"), metrics.map((name) => [name, name]), choice.y);
  fillSelect(element("study"), [["", "Training runs"], ...studies.map((name) => [name, `Study ${name}`])], choice.study);
  const varying = [...new Set(runs.flatMap((run) => Object.keys(run.recipe)))].sort();
  const fixed = Object.keys(board.constant).sort();
  if (choice.group && !"*@".includes(choice.group[0]) && !varying.includes(choice.group) && !fixed.includes(choice.group)) choice.group = "";
  const groups = [["", "nothing: single runs"], ["*", "same recipe (all but seeds)"], ["@stage", "stage"], ["@status", "status"]];
  fillSelect(element("group"), [...groups, ...varying.map((name) => [name, name]), ...fixed.map((name) => [name, `${name} (all equal)`])], choice.group);
  for (const name of ["x", "filter", "smooth"]) if (document.activeElement !== element(name)) element(name).value = choice[name];
  for (const name of ["logx", "logy"]) element(name).checked = choice[name];
}

function onChoice(event) {
  const { id, type, checked, value } = event.target;
  choice[id] = type === "checkbox" ? checked : type === "range" ? Number(value) : value;
  if (id === "study") {
    selected.clear();
    curves.clear();
    plot.zoom = null;
    choice.group = value ? "arm" : "";
    return update();
  }
  if (id === "x" || id === "y") curves.clear();
  if (id === "x" || id === "logx") plot.zoom = null;
  limit = PAGE_ROWS;
  if (id === "x" || id === "y" || id === "filter") return refreshCurves().then(show).catch(report);
  show();
}

// Data ------------------------------------------------------------------------------------------------------

async function fetchJson(path, body) {
  const options = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, options);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

const visible = () => {
  const words = choice.filter.toLowerCase().split(/\s+/).filter(Boolean);
  return board.runs.filter((run) => passes(run, words, board.constant));
};

async function refreshList() {
  const study = choice.study;
  const answer = await fetchJson(study ? `/api/list?study=${encodeURIComponent(study)}` : "/api/list");
  if (study === choice.study) Object.assign(board, { registered: null, verdicts: [], arms: [] }, answer);
}

// Asks for the curves that are new, have grown, or are too coarse for the number of runs that is shown.
async function refreshCurves() {
  const { study, x, y } = choice;
  const runs = visible();
  const points = Math.min(MOST_POINTS, 2 ** Math.floor(Math.log2(Math.max(32, ALL_POINTS / Math.max(1, runs.length)))));
  const asked = {};
  for (const run of runs) {
    const known = curves.get(run.id);
    if (!known || known.points < points || known.x.length > 4 * points) asked[run.id] = [0, 0];
    else if (known.at[0] !== run.at[0] || known.at[1] !== run.at[1]) asked[run.id] = known.at;
  }
  if (!y || !Object.keys(asked).length) return;
  const answer = await fetchJson("/api/curves", { study: study || null, x, y, points, runs: asked });
  if (study !== choice.study || x !== choice.x || y !== choice.y) return; // the choice changed on the way
  for (const [id, part] of Object.entries(answer.runs)) {
    const known = curves.get(id);
    if (part.fresh || !known) curves.set(id, { at: part.at, x: part.x, y: part.y, points });
    else curves.set(id, { ...known, at: part.at, x: known.x.concat(part.x), y: known.y.concat(part.y) });
  }
}

let updating = null;
function update() {
  updating ??= (async () => {
    try {
      let study;
      do { // again if another study was chosen on the way
        study = choice.study;
        await refreshList();
        showControls();
        await refreshCurves();
      } while (study !== choice.study);
      element("problem").hidden = true;
      show();
    } catch (error) {
      report(error);
    } finally {
      updating = null;
    }
  })();
  return updating;
}

function report(error) {
  element("problem").textContent = `The board does not answer (${error.message}). It is asked again every few seconds.`;
  element("problem").hidden = false;
}

// View ------------------------------------------------------------------------------------------------------

function show() {
  const runs = visible();
  const columns = runColumns();
  const column = columns.find((one) => one.name === order.name) ?? columns[1];
  const rows = sorted(runs, column, order.down);
  const faint = chooseLines(rows);
  const scene = { logx: choice.logx, logy: choice.logy, xLabel: UNITS[choice.x], yLabel: choice.y, empty: emptyNote(runs) };
  plot.show(lines, faint, scene);
  element("plot-heading").textContent = `${choice.y || "Curves"} over ${UNITS[choice.x]}`;
  showRuns(rows, columns);
  showLines(null);
  showPoints();
  showDiff();
  showStudy();
  showCounts();
  writeAddress();
}

function emptyNote(runs) {
  if (!board.runs.length) return `There are no runs in ${board.folder} yet. They appear here by themselves.`;
  return runs.length ? `No run has ${choice.y} yet.` : "No run passes the filter.";
}

// Sets `lines`, the coloured ones; returns the faint ones.
function chooseLines(rows) {
  const drawn = rows.map((run) => ({ run, ...curves.get(run.id) })).filter((one) => one.x?.length);
  for (const one of drawn) one.y = smoothed(one.y, choice.smooth);
  if (!choice.group) {
    const named = (run) => `${run.run} ${run.stage}`;
    const wanted = selected.size ? drawn.filter((one) => selected.has(one.run.id)) : drawn.slice(0, SINGLE_LINES);
    lines = wanted.slice(0, MOST_LINES).map((one, index) => ({ label: named(one.run), x: one.x, y: one.y, index, runs: [one.run] }));
    const coloured = new Set(lines.flatMap((line) => line.runs));
    element("plot-note").textContent = drawn.length > lines.length ? `${lines.length} coloured${selected.size ? "" : " (select runs in the table to choose them)"}, ${drawn.length - lines.length} faint` : "";
    return drawn.filter((one) => !coloured.has(one.run)).map((one) => ({ x: one.x, y: one.y, index: null }));
  }
  const groups = new Map();
  for (const one of drawn) {
    const key = groupOf(one.run, choice.group, board.constant);
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  const names = [...groups.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  lines = names.slice(0, MOST_LINES).map((name, index) => {
    const members = groups.get(name);
    return { label: name, ...groupLine(members, choice.logx), index, runs: members.map((one) => one.run) };
  });
  for (const line of lines) if (line.runs.length < 2) line.low = line.high = undefined;
  const beyond = names.length - lines.length;
  element("plot-note").textContent = `Mean and ±1 standard deviation over runs; single runs faint${beyond > 0 ? `; ${beyond} further groups without colour` : ""}`;
  return names.flatMap((name, index) => groups.get(name).map((one) => ({ x: one.x, y: one.y, index: index < MOST_LINES ? index : null, strong: selected.has(one.run.id) })));
}

// The table beside the plot: its legend, and the values at the cursor or, without one, the last ones.
function showLines(x) {
  const at = (line, values) => values && (x === null ? values[values.length - 1] : valueAt(line.x, values, x));
  const columns = [
    { name: "Line", head: true, cell: lineCell },
    ...(choice.group ? [{ name: "n", number: true, value: (line) => line.runs.length }] : []),
    { name: choice.group ? "Mean" : "Value", number: true, text: (line) => number(at(line, line.y)) },
    ...(choice.group ? [{ name: "SD", number: true, text: (line) => { const high = at(line, line.high); return line.high && high !== null ? `± ${number(high - at(line, line.y))}` : ""; } }] : []),
  ];
  renderTable(element("lines"), columns, lines, { id: (line) => line.label, caption: "The coloured lines of the plot with their values" });
  element("lines-note").textContent = x === null ? "last values" : `at ${number(x)} ${UNITS[choice.x]}`;
}

function lineCell(line, cell) {
  const swatch = cell.firstElementChild ?? cell.appendChild(document.createElement("span"));
  swatch.className = swatchClass(line.index);
  const text = cell.childNodes[1] ?? cell.appendChild(document.createTextNode(""));
  if (text.data !== line.label) text.data = line.label;
  cell.title = line.label;
}

// The plot as a table, for those who do not see it.
function showPoints() {
  if (!element("values").open || !lines.length) return;
  const first = Math.min(...lines.map((line) => line.x[0])), last = Math.max(...lines.map((line) => line.x[line.x.length - 1]));
  const rows = Array.from({ length: 11 }, (_, index) => ({ id: index, x: first + ((last - first) * index) / 10 }));
  const value = (line) => (row) => number(valueAt(line.x, line.y, row.x));
  const columns = [{ name: UNITS[choice.x], head: true, value: (row) => number(row.x) }, ...lines.map((line) => ({ name: line.label, number: true, text: value(line) }))];
  renderTable(element("points"), columns, rows, { caption: `${choice.y} at eleven positions along the x axis` });
}

function runColumns() {
  const metric = (name, title) => ({ name: title, number: true, value: (run) => run.last[name], text: (run) => number(run.last[name]) });
  const columns = [
    { name: "Select", fixed: true, cell: selectCell },
    { name: "Run", head: true, value: (run) => run.run },
    { name: "Stage", value: (run) => run.stage },
    { name: "Status", value: (run) => run.status, cell: statusCell },
    { name: "Last line", number: true, value: (run) => run.age, text: (run) => `${duration(run.age)} ago` },
    { name: "Step", number: true, value: (run) => run.last.step, text: (run) => number(run.last.step) + (run.steps ? ` / ${number(run.steps)}` : "") },
    metric("val_bpb", "val_bpb"), metric("loss", "loss"), metric("tokens_per_second", "tokens/s"),
    { name: "Time", number: true, value: (run) => run.last.seconds, text: (run) => duration(run.last.seconds) },
  ];
  if (choice.y && !["val_bpb", "loss", "tokens_per_second"].includes(choice.y)) columns.push(metric(choice.y, choice.y));
  const field = choice.group;
  if (field && !"*@".includes(field[0])) columns.push({ name: field, value: (run) => run.recipe[field] ?? board.constant[field], text: (run) => fieldText(run.recipe[field] ?? board.constant[field]) });
  return columns;
}

function selectCell(run, cell) {
  let box = cell.firstElementChild;
  if (!box) {
    box = cell.appendChild(document.createElement("input"));
    box.type = "checkbox";
    box.addEventListener("change", () => {
      if (box.checked) selected.add(box.value); else selected.delete(box.value);
      show();
    });
  }
  box.value = run.id;
  box.checked = selected.has(run.id);
  box.setAttribute("aria-label", `Select ${run.run} ${run.stage}`);
}

function statusCell(run, cell) {
  const text = `${SIGNS[run.status] ?? ""} ${run.status}`;
  if (cell.textContent !== text) cell.textContent = text;
  cell.className = run.status;
  cell.title = [run.reason, run.damaged ? `${run.damaged} damaged lines are left out` : ""].filter(Boolean).join("; ");
}

function showRuns(rows, columns) {
  const onSort = (name) => {
    order = { name, down: order.name === name ? !order.down : false };
    show();
  };
  const rowClass = (run) => (selected.has(run.id) ? "chosen" : "");
  const shown = rows.slice(0, limit);
  renderTable(element("runs"), columns, shown, { order, onSort, rowClass, caption: "Runs. Select two to compare their recipes." });
  element("runs-heading").textContent = choice.study ? "Trials" : "Runs";
  element("runs-note").textContent = `${rows.length}${rows.length < board.runs.length ? ` of ${board.runs.length}` : ""}${selected.size ? `, ${selected.size} selected` : ""}`;
  element("more").hidden = rows.length <= limit;
  element("more").textContent = `Show ${Math.min(PAGE_ROWS, rows.length - limit)} more`;
  element("clear").hidden = !selected.size;
}

function showDiff() {
  const chosen = [...selected].map((id) => board.runs.find((run) => run.id === id)).filter(Boolean);
  element("diff-scroll").hidden = chosen.length !== 2;
  if (chosen.length !== 2) {
    element("diff-note").textContent = `Select two ${choice.study ? "trials" : "runs"} in the table to compare their recipes.`;
    return;
  }
  const [a, b] = chosen;
  const names = [...new Set([...Object.keys(a.recipe), ...Object.keys(b.recipe)])].sort();
  const rows = names.map((name) => ({ id: name, a: fieldText(a.recipe[name]), b: fieldText(b.recipe[name]) })).filter((row) => row.a !== row.b);
  const equal = Object.keys(board.constant).length + names.length - rows.length;
  element("diff-note").textContent = `${rows.length ? `${rows.length} field${rows.length > 1 ? "s" : ""} differ${rows.length > 1 ? "" : "s"}` : "The recipes are equal"}; ${equal} equal.`;
  const columns = [{ name: "Field", head: true, value: (row) => row.id }, { name: `${a.run} ${a.stage}`, value: (row) => row.a }, { name: `${b.run} ${b.stage}${a.run === b.run && a.stage === b.stage ? " (2)" : ""}`, value: (row) => row.b }];
  renderTable(element("diff"), columns, rows, { caption: "Fields of the two recipes that differ" });
}

function showStudy() {
  element("study-card").hidden = !choice.study;
  if (!choice.study || !board.registered) return;
  element("study-heading").textContent = `Study ${choice.study}`;
  const facts = Object.entries(board.registered).filter(([name, value]) => !name.startsWith("facts.") && value !== null && String(value).length < 120);
  element("registered").textContent = facts.map(([name, value]) => `${name} ${fieldText(value)}`).join(" · ");
  const rows = board.verdicts.map((row, index) => ({ id: index, ...row }));
  const finite = rows.flatMap((row) => [row.low, row.mean, row.high, 0]).filter((value) => typeof value === "number");
  const range = [Math.min(...finite, 0), Math.max(...finite, 0)];
  const signed = (value) => (typeof value === "number" ? (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value)) : "");
  const columns = [
    { name: "Idea", head: true, value: (row) => row.idea }, { name: "Equal", value: (row) => row.axis },
    { name: "n", number: true, value: (row) => row.n },
    { name: "Mean difference", number: true, text: (row) => signed(row.mean) },
    { name: "Interval", number: true, text: (row) => (row.n ? `[${signed(row.low) || "−∞"}, ${signed(row.high) || "∞"}]` : "") },
    { name: "", cell: (row, cell) => cell.replaceChildren(...(typeof row.mean === "number" ? [whisker(row.low, row.mean, row.high, range)] : [])) },
    { name: "e-value", number: true, text: (row) => number(row.e_value) },
    { name: "Verdict", cell: (row, cell) => { cell.textContent = row.verdict ?? ""; cell.className = { better: "better", worse: "worse" }[row.verdict] ?? ""; } },
  ];
  renderTable(element("verdicts"), columns, rows, { caption: "Difference of each idea to the baseline; lower is better" });
  const arms = [
    { name: "Arm", head: true, value: (row) => row.arm }, { name: "Steps", number: true, text: (row) => number(row.steps) },
    { name: "n", number: true, value: (row) => row.n }, { name: "Diverged", number: true, value: (row) => row.diverged },
    { name: "Mean val_bpb", number: true, text: (row) => number(row.mean) }, { name: "SD", number: true, text: (row) => number(row.sd) },
    { name: "Tokens/s", number: true, text: (row) => number(row.tokens_per_second) },
  ];
  renderTable(element("arms"), arms, board.arms, { id: (row) => `${row.arm} ${row.steps}`, caption: "Final scores of each arm" });
}

function showCounts() {
  element("folder").textContent = board.folder;
  const counts = new Map();
  for (const run of board.runs) counts.set(run.status, (counts.get(run.status) ?? 0) + 1);
  const text = Object.keys(SIGNS).filter((name) => counts.has(name)).map((name) => `${counts.get(name)} ${name}`).join(", ");
  if (element("counts").textContent !== text) element("counts").textContent = text; // announced: only when it changes
}

// Start -----------------------------------------------------------------------------------------------------

let speaking;
const plot = new Plot(element("plot"), {
  onZoom: (zoomed) => { element("reset").hidden = !zoomed; },
  onCursor: (x) => {
    showLines(x);
    if (x === null || document.activeElement !== element("plot")) return;
    clearTimeout(speaking); // after the last of several key presses
    speaking = setTimeout(() => {
      const values = lines.map((line) => [line.label, number(valueAt(line.x, line.y, x))]).filter(([, value]) => value);
      element("spoken").textContent = `At ${number(x)} ${UNITS[choice.x]}: ${values.map((pair) => pair.join(" ")).join("; ")}`;
    }, 250);
  },
});

function setTheme(scheme) {
  document.documentElement.style.colorScheme = scheme;
  element("theme").value = scheme;
  plot.recolour();
}

function setLive(on) {
  live = on;
  element("live").setAttribute("aria-pressed", String(on));
}

async function poll() {
  const start = performance.now();
  if (live && !document.hidden) await update();
  const seconds = (performance.now() - start) / 1000;
  setTimeout(poll, 1000 * Math.max(POLL_SECONDS, 10 * seconds)); // a large folder is asked less often
}

element("controls").addEventListener("input", onChoice);
element("controls").addEventListener("submit", (event) => event.preventDefault());
element("reset").addEventListener("click", () => { plot.setZoom(null); element("plot").focus(); });
element("clear").addEventListener("click", () => { selected.clear(); show(); element("runs-heading").focus(); });
element("more").addEventListener("click", () => { limit += PAGE_ROWS; show(); });
element("live").addEventListener("click", () => { setLive(!live); if (live) update(); });
element("values").addEventListener("toggle", showPoints);
element("theme").addEventListener("change", (event) => {
  localStorage.setItem("quern-board-theme", event.target.value);
  setTheme(event.target.value);
  show();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { plot.recolour(); show(); });
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
  event.preventDefault();
  element("filter").focus();
});
readAddress();
const schemes = [...element("theme").options].map((option) => option.value);
setTheme(schemes.find((scheme) => scheme === localStorage.getItem("quern-board-theme")) ?? schemes[0]);
poll();
