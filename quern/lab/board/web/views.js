// The tables of the board: lines, values along the lines, runs, the difference of two recipes, a study, and counts.
import { decimal, duration, fieldText, number, valueAt } from "./curves.js";
import { swatchClass } from "./plot.js";
import { PAGE_ROWS, SIGNS, UNITS, board, choice, element, fieldOf, label, measured, selected, view } from "./state.js";
import { renderTable, whisker } from "./tables.js";

// The table beside the plot: its legend, and the values at the cursor or, without one, the last ones.
export function showLines(x) {
  const at = (line, values) => values && (x === null ? values[values.length - 1] : valueAt(line.x, values, x));
  const deviation = (line) => {
    const high = at(line, line.high);
    return high === undefined || high === null ? "" : `± ${number(high - at(line, line.y), 3)}`;
  };
  const group = [
    { name: "n", number: true, text: (line) => String(Math.floor(at(line, line.n) ?? 0) || "") },
    { name: "Mean", number: true, text: (line) => decimal(at(line, line.y)) },
    { name: "SD", number: true, text: deviation },
  ];
  const single = [{ name: "Value", number: true, text: (line) => decimal(at(line, line.y)) }];
  const columns = [{ name: "Line", head: true, cell: lineCell }, ...(choice.group ? group : single)];
  renderTable(element("lines"), columns, view.lines, { id: (line) => line.label, caption: "The coloured lines of the plot with their values" });
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
export function showPoints() {
  const { lines } = view;
  if (!element("values").open || !lines.length) return;
  const first = Math.min(...lines.map((line) => line.x[0]));
  const last = Math.max(...lines.map((line) => line.x[line.x.length - 1]));
  const rows = Array.from({ length: 11 }, (_, index) => ({ id: index, x: first + ((last - first) * index) / 10 }));
  const value = (line) => (row) => decimal(valueAt(line.x, line.y, row.x));
  const columns = [{ name: UNITS[choice.x], head: true, value: (row) => number(row.x) }, ...lines.map((line) => ({ name: line.label, number: true, text: value(line) }))];
  renderTable(element("points"), columns, rows, { caption: `${label(choice.y)} at eleven positions along the x axis` });
}

export function runColumns() {
  const { metrics } = board;
  const shown = [...new Set(["val_bpb", "loss", "tokens_per_second", choice.y])].filter((name) => metrics.includes(name));
  const field = choice.group && !"*@".includes(choice.group[0]) && !(choice.study && choice.group === "arm") ? [choice.group] : [];
  const age = { name: "Last line", number: true, value: (run) => run.age, text: (run) => `${duration(run.age)} ago` };
  return [
    { name: "Select", fixed: true, cell: selectCell },
    { name: choice.study ? "Arm" : "Run", head: true, value: (run) => run.run, cell: nameCell },
    { name: choice.study ? "Seed" : "Stage", value: (run) => run.stage },
    { name: "Status", value: (run) => run.status, cell: statusCell },
    ...(choice.study ? [] : [age]),
    { name: "Step", number: true, value: (run) => run.last.step, text: (run) => number(run.last.step) + (run.steps ? ` / ${number(run.steps)}` : "") },
    ...shown.map((name) => ({ name: label(name), number: true, value: (run) => run.last[name], text: (run) => measured(name, run.last[name]) })),
    { name: "Time", number: true, value: (run) => run.last.seconds, text: (run) => duration(run.last.seconds) },
    ...(choice.study ? [] : [{ name: "Open", fixed: true, cell: linksCell }]),
    ...field.map((name) => ({ name, value: (run) => fieldOf(run, name), text: (run) => fieldText(fieldOf(run, name)) })),
  ];
}

// In the order of the runs, a stage stands under the first one of its run.
function nameCell(run, cell) {
  if (cell.textContent !== run.run) cell.textContent = run.run;
  cell.title = run.run;
  cell.classList.toggle("under", view.under.has(run.id));
}

// A word of a command, quoted for the shell where that is needed.
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

// Report and samples are pages of the board; the chat needs a command, which is copied, and a model of PyTorch.
function linksCell(run, cell) {
  const shape = view.under.has(run.id) ? "" : `${run.run} ${run.stage} ${run.report}`;
  if (cell.dataset.shape === shape) return;
  cell.dataset.shape = shape;
  const link = (text, end) => Object.assign(document.createElement("a"), { textContent: text, href: `/report/${encodeURIComponent(run.run)}${end}` });
  const chat = Object.assign(document.createElement("button"), { type: "button", textContent: "chat", className: "link" });
  const command = `quern serve --run ${quoted(run.run)} --out ${quoted(board.folder)}`;
  chat.title = `Copies the command: ${command}`;
  chat.addEventListener("click", async () => {
    const copied = await navigator.clipboard?.writeText(command).then(() => " (copied)", () => "");
    element("runs-said").textContent = `To chat, run this in a terminal${copied ?? ""}: ${command}`;
  });
  cell.replaceChildren(...(shape === "" ? [] : [...(run.report ? [link("report", ""), " ", link("samples", "#samples"), " "] : []), ...(run.stage === "grug" ? [] : [chat])]));
}

// The names of the selected runs.
export const selectedRuns = () => [...new Set([...selected].map((id) => board.runs.find((run) => run.id === id)?.run).filter(Boolean))];

function selectCell(run, cell) {
  let box = cell.firstElementChild;
  if (!box) {
    box = cell.appendChild(document.createElement("input"));
    box.type = "checkbox";
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

export function showRuns(rows, columns, onSort) {
  const rowClass = (run) => (selected.has(run.id) ? "chosen" : "");
  const shown = rows.slice(0, view.limit);
  const inOrder = !choice.study && view.order.name === "Run";
  view.under = new Set(shown.filter((run, index) => inOrder && index > 0 && shown[index - 1].run === run.run).map((run) => run.id));
  renderTable(element("runs"), columns, shown, { order: view.order, onSort, rowClass, caption: "Runs. Select two to compare their recipes." });
  element("runs-heading").textContent = choice.study ? "Trials" : "Runs";
  element("runs-note").textContent = `${rows.length}${rows.length < board.runs.length ? ` of ${board.runs.length}` : ""}${selected.size ? `, ${selected.size} selected` : ""}`;
  element("more").hidden = rows.length <= view.limit;
  element("more").textContent = `Show ${Math.min(PAGE_ROWS, rows.length - view.limit)} more`;
  element("clear").hidden = !selected.size;
  for (const name of ["rename", "remove"]) element(name).hidden = Boolean(choice.study) || selectedRuns().length !== 1;
}

export function showDiff() {
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

export function showStudy() {
  element("study-card").hidden = !choice.study;
  if (!choice.study || !board.registered) return;
  element("study-heading").textContent = `${board.kinds[choice.study]}: ${choice.study}`;
  const facts = Object.entries(board.registered).filter(([name, value]) => !name.startsWith("facts.") && value !== null && String(value).length < 120);
  element("registered").textContent = facts.map(([name, value]) => `${name} ${fieldText(value)}`).join(" · ");
  const rows = board.verdicts.map((row, index) => ({ ...row, id: index }));
  const finite = rows.flatMap((row) => [row.low, row.mean, row.high, 0]).filter((value) => typeof value === "number");
  const range = [Math.min(...finite, 0), Math.max(...finite, 0)];
  const sign = (value) => (value > 0 ? "+" : value < 0 ? "−" : "");
  const signed = (value) => (typeof value === "number" ? sign(value) + decimal(Math.abs(value)) : "");
  const columns = [
    { name: "Idea", head: true, value: (row) => row.idea }, { name: "Equal", value: (row) => row.axis },
    { name: "n", number: true, value: (row) => row.n },
    { name: "Mean difference", number: true, text: (row) => signed(row.mean) },
    { name: "Interval", number: true, text: (row) => (row.n && row.low !== undefined ? `[${signed(row.low) || "−∞"}, ${signed(row.high) || "∞"}]` : "") },
    { name: "", cell: (row, cell) => cell.replaceChildren(...(typeof row.mean === "number" ? [whisker(row.low, row.mean, row.high, range)] : [])) },
    { name: "Verdict", cell: (row, cell) => { cell.textContent = row.verdict ?? ""; cell.className = /^(better|worse)/.exec(row.verdict)?.[0] ?? ""; } },
  ];
  element("verdicts-scroll").hidden = !rows.length; // as of a sweep
  renderTable(element("verdicts"), columns, rows, { caption: "Difference of each idea to the baseline; lower is better" });
}

export function showCounts() {
  element("folder").textContent = board.folder;
  const counts = new Map();
  for (const run of board.runs) counts.set(run.status, (counts.get(run.status) ?? 0) + 1);
  const text = Object.keys(SIGNS).filter((name) => counts.has(name)).map((name) => `${counts.get(name)} ${name}`).join(", ");
  if (element("counts").textContent !== text) element("counts").textContent = text; // announced: only when it changes
}
