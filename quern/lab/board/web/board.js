// The board: asks the server for runs and for the points it does not have yet, and shows them. What comes from files
// reaches the page through textContent, never as markup.
import { MOST_LINES, decimal, groupLine, groupOf, number, smoothed, valueAt } from "./curves.js";
import { Plot } from "./plot.js";
import { PAGE_ROWS, UNITS, board, choice, curves, element, label, readAddress, selected, view, visible, writeAddress } from "./state.js";
import { sorted } from "./tables.js";
import { runColumns, selectedRuns, showCounts, showDiff, showLines, showPoints, showRuns, showStudy } from "./views.js";

const POLL_SECONDS = 2, SINGLE_LINES = 8, MOST_POINTS = 1000, ALL_POINTS = 32000;
let live = true;

// Controls --------------------------------------------------------------------------------------------------

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
  fillSelect(element("y"), metrics.map((name) => [name, label(name)]), choice.y);
  fillSelect(element("study"), [["", "Training runs"], ...studies.map((name) => [name, `${board.kinds[name]}: ${name}`])], choice.study);
  const varying = [...new Set(runs.flatMap((run) => Object.keys(run.recipe)))].sort();
  if (choice.group && !"*@".includes(choice.group[0]) && !varying.includes(choice.group)) choice.group = "";
  const groups = [["", "nothing: single runs"], ["*", "same recipe (all but seeds)"], ["@stage", "stage"], ["@status", "status"]];
  fillSelect(element("group"), [...groups, ...varying.map((name) => [name, name])], choice.group);
  for (const name of ["x", "filter", "smooth"]) if (document.activeElement !== element(name)) element(name).value = choice[name];
  for (const name of ["logx", "logy"]) element(name).checked = choice[name];
}

function chooseStudy(name) {
  selected.clear();
  curves.clear();
  plot.zoom = null;
  choice.study = name;
  choice.group = name ? "arm" : "";
}

function onChoice(event) {
  const { id, type, checked, value } = event.target;
  if (id === "study") {
    chooseStudy(value);
    return update();
  }
  choice[id] = type === "checkbox" ? checked : type === "range" ? Number(value) : value;
  if (id === "x" || id === "y") curves.clear();
  if (id === "x" || id === "logx") plot.zoom = null;
  view.limit = PAGE_ROWS;
  if (id === "x" || id === "y" || id === "filter") return refreshCurves().then(show).catch(report);
  show();
}

// Data ------------------------------------------------------------------------------------------------------

async function fetchJson(path, body) {
  const options = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, options);
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error), { status: response.status });
  return answer;
}

async function refreshList() {
  const study = choice.study;
  const asked = fetchJson(study ? `/api/list?study=${encodeURIComponent(study)}` : "/api/list");
  const answer = await asked.catch((error) => {
    if (!study || error.status !== 404) throw error;
    if (study === choice.study) chooseStudy(""); // it was removed
  });
  if (study === choice.study) Object.assign(board, { registered: null, verdicts: [] }, answer);
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

// A folder that has studies and no training runs opens with its first study.
let opening = true;
function chooseFirst() {
  if (opening && !choice.study && !board.runs.length && board.studies.length) chooseStudy(board.studies[0]);
  opening = false;
}

let updating = null;
function update() {
  updating ??= (async () => {
    try {
      let study;
      do { // again if another study was chosen on the way
        study = choice.study;
        await refreshList();
        if (study === choice.study) chooseFirst();
        if (study !== choice.study) continue; // another list
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
  const column = columns.find((one) => one.name === view.order.name) ?? columns[1];
  const rows = sorted(runs, column, view.order.down);
  const faint = chooseLines(rows);
  const scene = { logx: choice.logx, logy: choice.logy, xLabel: UNITS[choice.x], yLabel: label(choice.y), empty: emptyNote(runs) };
  plot.show(view.lines, faint, scene);
  element("plot-heading").textContent = `${choice.y ? label(choice.y) : "Curves"} over ${UNITS[choice.x]}`;
  showRuns(rows, columns, (name) => {
    view.order = { name, down: view.order.name === name ? !view.order.down : false };
    show();
  });
  showLines(view.at);
  showPoints();
  showDiff();
  showStudy();
  showCounts();
  writeAddress();
}

function emptyNote(runs) {
  if (!board.runs.length) return `There are no runs in ${board.folder} yet. They appear here by themselves.`;
  return runs.length ? `No run has ${label(choice.y)} yet.` : "No run passes the filter.";
}

// Sets `view.lines`, the coloured ones; returns the faint ones.
function chooseLines(rows) {
  const drawn = rows.map((run) => ({ run, ...curves.get(run.id) })).filter((one) => one.x?.length);
  for (const one of drawn) one.y = smoothed(one.y, choice.smooth);
  return choice.group ? groupedLines(drawn) : singleLines(drawn);
}

function singleLines(drawn) {
  const wanted = selected.size ? drawn.filter((one) => selected.has(one.run.id)) : drawn.slice(0, SINGLE_LINES);
  view.lines = wanted.slice(0, MOST_LINES).map(({ run, x, y }, index) => ({ label: `${run.run} ${run.stage}`, x, y, index, runs: [run] }));
  const coloured = new Set(view.lines.flatMap((line) => line.runs));
  const faint = drawn.filter((one) => !coloured.has(one.run)).map((one) => ({ x: one.x, y: one.y, index: null }));
  const how = selected.size ? "" : " (select runs in the table to choose them)";
  element("plot-note").textContent = faint.length ? `${view.lines.length} coloured${how}, ${faint.length} faint` : "";
  return faint;
}

// Stages, rungs and values of a tuned field are never averaged with each other.
function groupedLines(drawn) {
  const apart = choice.study ? ["rung", "value"] : ["@stage"];
  const varying = apart.filter((by) => by !== choice.group && new Set(drawn.map((one) => groupOf(one.run, by, {}))).size > 1);
  const groups = new Map();
  for (const one of drawn) {
    const parts = varying.map((by) => by.startsWith("@") ? one.run.stage : `${by} ${groupOf(one.run, by, board.constant)}`);
    const key = [groupOf(one.run, choice.group, board.constant), ...parts].join(" · ");
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  const names = [...groups.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  view.lines = names.slice(0, MOST_LINES).map((name, index) => {
    const members = groups.get(name);
    const line = { label: name, ...groupLine(members, choice.logx), index, runs: members.map((one) => one.run) };
    return members.length > 1 ? line : { ...line, low: undefined, high: undefined };
  });
  const beyond = names.length - view.lines.length;
  const more = beyond > 0 ? `; ${beyond} further groups without colour` : "";
  element("plot-note").textContent = `Mean and ±1 standard deviation over runs; single runs faint${more}`;
  const colour = (index) => (index < MOST_LINES ? index : null);
  return names.flatMap((name, index) =>
    groups.get(name).map((one) => ({ x: one.x, y: one.y, index: colour(index), strong: selected.has(one.run.id) })));
}

// Start -----------------------------------------------------------------------------------------------------

let kept = {};
try { kept = localStorage ?? kept; } catch {} // null or an error, switched off: a theme lasts as long as the page
let speaking;
const plot = new Plot(element("plot"), {
  onZoom: (zoomed) => { element("reset").hidden = !zoomed; },
  onCursor: (x) => {
    view.at = x;
    showLines(x);
    if (x === null || document.activeElement !== element("plot")) return;
    clearTimeout(speaking); // after the last of several key presses
    speaking = setTimeout(() => {
      const values = view.lines.map((line) => [line.label, decimal(valueAt(line.x, line.y, x))]).filter(([, value]) => value);
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
element("runs").addEventListener("change", ({ target }) => {
  if (target.checked) selected.add(target.value); else selected.delete(target.value);
  show();
});
// Rename and remove -----------------------------------------------------------------------------------------

function manage(action) {
  const [run] = selectedRuns();
  const dialog = element("manage");
  dialog.dataset.action = action;
  dialog.dataset.run = run;
  element("manage-heading").textContent = action === "rename" ? `Rename ${run}` : `Remove ${run}?`;
  element("manage-text").textContent = action === "rename" ? "" : "Its checkpoints, records and report are deleted. The prepared text stays.";
  element("new-name-label").hidden = action !== "rename";
  element("new-name").value = run;
  element("manage-do").textContent = action === "rename" ? "Rename" : "Remove";
  element("manage-problem").hidden = true;
  dialog.showModal();
  if (action === "rename") element("new-name").select();
}

async function manageNow() {
  const { action, run } = element("manage").dataset;
  try {
    const { told } = await fetchJson("/api/manage", { action, run, to: element("new-name").value.trim() });
    element("manage").close();
    selected.clear();
    await update();
    element("runs-said").textContent = told.join(" ");
    element("runs-heading").focus();
  } catch (error) {
    element("manage-problem").textContent = error.message;
    element("manage-problem").hidden = false;
  }
}

for (const action of ["rename", "remove"]) element(action).addEventListener("click", () => manage(action));
element("manage-do").addEventListener("click", manageNow);
element("new-name").addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); manageNow(); } });
element("manage-cancel").addEventListener("click", () => element("manage").close());
element("clear").addEventListener("click", () => { selected.clear(); show(); element("runs-heading").focus(); });
element("more").addEventListener("click", () => { view.limit += PAGE_ROWS; show(); });
element("live").addEventListener("click", () => { setLive(!live); if (live) update(); });
element("values").addEventListener("toggle", showPoints);
element("theme").addEventListener("change", (event) => {
  kept["quern-board-theme"] = event.target.value;
  setTheme(event.target.value);
  show();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { plot.recolour(); show(); });
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
  event.preventDefault();
  element("filter").focus();
});
window.addEventListener("hashchange", () => { // a bookmark that is opened in the same tab, or the link to the table
  if (!location.hash.includes("=")) return;
  chooseStudy("");
  readAddress();
  update();
});
readAddress();
setTheme([...element("theme").options].find(({ value }) => value === kept["quern-board-theme"])?.value ?? "light dark");
poll();
