// Tables whose rows are kept while they are updated, so that focus and selection stay. Text is set as text only.

const SVG = "http://www.w3.org/2000/svg";

// columns: {name, value(row), text(row), number, head, fixed, cell(row, td)}; rows have ids. order: {name, down} or null.
export function renderTable(table, columns, rows, { id = (row) => row.id, order = null, onSort = null, caption, rowClass } = {}) {
  renderHead(table, columns, order, onSort, caption);
  const body = table.tBodies[0] ?? table.createTBody();
  const shape = columns.map((column) => column.name).join("|");
  if (table.dataset.shape !== shape) body.replaceChildren();
  table.dataset.shape = shape;
  const known = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  let before = body.firstElementChild;
  for (const row of rows) {
    const key = String(id(row));
    let line = known.get(key);
    if (!line) {
      line = document.createElement("tr");
      line.dataset.id = key;
      for (const column of columns) {
        const cell = document.createElement(column.head ? "th" : "td");
        if (column.head) cell.scope = "row";
        cell.className = column.number ? "number" : column.head ? "name" : "";
        line.append(cell);
      }
    }
    known.delete(key);
    line.className = rowClass ? rowClass(row) : "";
    columns.forEach((column, index) => fill(line.cells[index], column, row));
    if (line !== before) body.insertBefore(line, before);
    else before = before.nextElementSibling;
  }
  for (const line of known.values()) line.remove();
}

function fill(cell, column, row) {
  if (column.cell) return column.cell(row, cell);
  const text = column.text ? column.text(row) : String(column.value(row) ?? "");
  if (cell.textContent !== text) cell.textContent = text;
  if (column.head && cell.title !== text) cell.title = text;
}

function renderHead(table, columns, order, onSort, caption) {
  const shape = columns.map((column) => `${column.name}${order?.name === column.name ? order.down : ""}`).join("|");
  if (table.dataset.head === shape) return;
  table.dataset.head = shape;
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset.column : undefined;
  if (caption && !table.caption) {
    table.createCaption().textContent = caption;
    table.caption.className = "hidden";
  }
  const line = document.createElement("tr");
  for (const column of columns) {
    const cell = document.createElement("th");
    cell.scope = "col";
    if (column.number) cell.className = "number";
    if (onSort && !column.fixed) {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.column = button.textContent = column.name;
      button.addEventListener("click", () => onSort(column.name));
      cell.append(button);
      cell.setAttribute("aria-sort", order?.name === column.name ? (order.down ? "descending" : "ascending") : "none");
    } else {
      cell.textContent = column.name;
    }
    line.append(cell);
  }
  (table.tHead ?? table.createTHead()).replaceChildren(line);
  if (focused) [...line.querySelectorAll("button")].find((button) => button.dataset.column === focused)?.focus();
}

// Rows in order; those without a value come last.
export function sorted(rows, column, down) {
  const key = (row) => column.value(row);
  const empty = (value) => value === null || value === undefined || value === "";
  return [...rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (empty(x) || empty(y)) return empty(x) - empty(y);
    const less = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return down ? -less : less;
  });
}

// An interval as a small drawing: its range, its mean, and zero. The numbers are in the cells beside it.
export function whisker(low, mean, high, [from, to]) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 180 18");
  svg.setAttribute("class", "whisker");
  svg.setAttribute("aria-hidden", "true");
  const at = (value) => 4 + (172 * (Math.min(Math.max(value, from), to) - from)) / (to - from || 1);
  const add = (kind, attributes) => {
    const shape = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
    svg.append(shape);
  };
  add("line", { class: "zero", x1: at(0), x2: at(0), y1: 0, y2: 18 });
  add("line", { class: "range", x1: at(low ?? from), x2: at(high ?? to), y1: 9, y2: 9 });
  add("circle", { cx: at(mean), cy: 9, r: 4 });
  return svg;
}
