// The plot: coloured lines with bands are series of uPlot; the many faint single runs are drawn beneath them.
/* global uPlot */
import { number } from "./curves.js";

const COLOURS = 6;
export const swatchClass = (index) => `swatch k${index % COLOURS}${index >= COLOURS ? " dashed" : ""}`;

// Resolves the palette of board.css, which depends on light or dark, to colours for the canvas.
function palette(box) {
  const probe = document.createElement("span");
  box.append(probe);
  const colour = (name) => { probe.className = name; return getComputedStyle(probe).color; };
  const found = {
    lines: Array.from({ length: COLOURS }, (_, index) => colour(`k${index}`)),
    faint: colour("faint"), ink: colour("quiet"),
  };
  probe.className = "card";
  found.grid = getComputedStyle(probe).borderTopColor;
  probe.remove();
  return found;
}

const withAlpha = (colour, alpha) => colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);

export class Plot {
  // onCursor(x or null): the reader's position; onZoom(zoomed).
  constructor(box, { onCursor, onZoom }) {
    this.box = box;
    this.onCursor = onCursor;
    this.onZoom = onZoom;
    this.zoom = null;
    this.plot = null;
    this.colours = palette(this.box);
    new ResizeObserver(() => this.resize()).observe(box);
    box.addEventListener("keydown", (event) => this.key(event));
  }

  // lines: {label, x, y, low, high, index}; faint: {x, y, index or null, strong}; scene: {logx, logy, xLabel, yLabel, empty}.
  show(lines, faint, scene) {
    const positive = (curve) => curve.x.length > 0;
    const cut = (curve) => positiveOnly(curve, scene);
    this.lines = lines.map(cut).filter(positive);
    this.faint = faint.map(cut).filter(positive);
    this.scene = scene;
    const shape = JSON.stringify([scene, this.lines.map((line) => [line.label, line.index, !!line.low]), this.colours.ink]);
    if (!this.lines.length && !this.faint.length) return this.clear(scene.empty);
    const data = table(this.lines, this.extent("x"));
    if (this.plot && shape === this.shape) {
      this.plot.setData(data, false);
      this.rescale();
      return;
    }
    this.shape = shape;
    this.clear();
    this.plot = new uPlot(this.options(), data, this.box);
    this.rescale();
  }

  clear(message) {
    if (this.plot) {
      this.plot.destroy();
      this.plot = null;
      this.onCursor(null);
    }
    this.box.querySelector(".empty")?.remove();
    if (message === undefined) return;
    this.shape = null;
    const note = document.createElement("p");
    note.className = "empty";
    note.textContent = message;
    this.box.append(note);
  }

  recolour() {
    this.colours = palette(this.box);
    this.shape = null;
  }

  resize() {
    this.plot?.setSize({ width: this.box.clientWidth, height: this.box.clientHeight });
  }

  // The smallest and largest x, or y within the shown x.
  extent(axis, [from, to] = [-Infinity, Infinity]) {
    let low = Infinity, high = -Infinity;
    const take = (value) => { if (value < low) low = value; if (value > high) high = value; };
    for (const curve of [...this.lines, ...this.faint]) {
      for (let index = 0; index < curve.x.length; index++) {
        if (curve.x[index] < from || curve.x[index] > to) continue;
        if (axis === "x") take(curve.x[index]);
        else for (const value of [curve.y, curve.low, curve.high]) if (value) take(value[index]);
      }
    }
    return low > high ? this.scene[`log${axis}`] ? [1, 10] : [0, 1] : [low, high];
  }

  rescale() {
    const [left, right] = this.zoom ?? this.extent("x");
    const [low, high] = this.extent("y", [left, right]);
    const { logx, logy } = this.scene;
    const wide = (a, b, log) => (a < b ? [a, b] : log ? [a / 2, b * 2] : [a - (Math.abs(a) || 1) / 2, b + (Math.abs(b) || 1) / 2]);
    const [x0, x1] = wide(left, right, logx);
    let [y0, y1] = wide(low, high, logy);
    if (logy) { const pad = (y1 / y0) ** 0.05; y0 /= pad; y1 *= pad; }
    else { const pad = (y1 - y0) * 0.05; y0 -= pad; y1 += pad; }
    this.ranges = { x: [x0, x1], y: [y0, y1] };
    this.plot.batch(() => {
      this.plot.setScale("x", { min: x0, max: x1 });
      this.plot.setScale("y", { min: y0, max: y1 });
    });
    this.onZoom(this.zoom !== null);
  }

  setZoom(range) {
    this.zoom = range;
    if (this.plot) this.rescale();
  }

  options() {
    const { logx, logy, xLabel, yLabel } = this.scene;
    const axis = (label, log, size) => ({
      label, size, labelSize: 22, labelGap: 2, stroke: this.colours.ink, font: "12px system-ui", labelFont: "12px system-ui",
      grid: { stroke: this.colours.grid, width: 1 }, ticks: { stroke: this.colours.grid, width: 1, size: 5 },
      values: (_, splits) => splits.map((split) => number(split, 5)), filter: (_, splits) => splits,
      ...(log ? { splits: (u, side, min, max) => logTicks(min, max) } : {}),
    });
    const series = [{}];
    const bands = [];
    for (const line of this.lines) {
      const colour = this.colours.lines[line.index % COLOURS];
      const dash = line.index >= COLOURS ? [7, 4] : undefined;
      const sparse = line.x.length <= 30 && !line.low;
      series.push({ label: line.label, stroke: colour, width: 2, dash, spanGaps: true, points: { show: sparse, size: 5, fill: colour } });
      if (line.low) {
        const edge = { stroke: withAlpha(colour, 0), width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...edge }, { ...edge });
        bands.push({ series: [series.length - 2, series.length - 1], fill: withAlpha(colour, 0.16) });
      }
    }
    const fixed = (name) => () => this.ranges?.[name] ?? [1, 10];
    return {
      width: this.box.clientWidth, height: this.box.clientHeight, series, bands,
      scales: {
        x: { time: false, distr: logx ? 3 : 1, range: fixed("x") },
        y: { distr: logy ? 3 : 1, range: fixed("y") },
      },
      axes: [axis(xLabel, logx, 34), axis(yLabel, logy, 58)],
      legend: { show: false },
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false },
        points: { show: (u, index) => (this.isLine(index) ? point(u, index) : null) },
      },
      hooks: {
        drawClear: [(u) => this.drawFaint(u)],
        setCursor: [(u) => this.onCursor(u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null)],
        setSelect: [(u) => {
          if (u.select.width < 5) return;
          const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.setZoom(range);
        }],
      },
    };
  }

  isLine(index) {
    let at = 1;
    for (const line of this.lines) {
      if (at === index) return true;
      at += line.low ? 3 : 1;
    }
    return false;
  }

  drawFaint(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineJoin = "round";
    const alpha = Math.min(0.3, Math.max(0.03, 20 / this.faint.length)); // many runs are a cloud, not a wall
    for (const curve of this.faint) {
      ctx.strokeStyle = curve.index === null ? this.colours.faint : this.colours.lines[curve.index % COLOURS];
      ctx.globalAlpha = curve.strong ? 0.95 : curve.index === null ? Math.min(1, 2 * alpha) : alpha;
      ctx.lineWidth = (curve.strong ? 2 : 1) * devicePixelRatio;
      ctx.beginPath();
      for (let index = 0; index < curve.x.length; index++) {
        ctx.lineTo(u.valToPos(curve.x[index], "x", true), u.valToPos(curve.y[index], "y", true));
      }
      ctx.stroke();
    }
    ctx.restore();
  }

  // The keyboard does what the pointer does.
  key(event) {
    if (!this.plot || event.altKey || event.ctrlKey || event.metaKey) return;
    const width = this.plot.over.clientWidth;
    const at = this.plot.cursor.left >= 0 ? this.plot.cursor.left : width / 2;
    const stride = width * (event.shiftKey ? 0.1 : 0.02);
    const moves = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: 0, End: width };
    if (event.key in moves) {
      this.plot.setCursor({ left: Math.min(Math.max(moves[event.key], 0), width), top: 10 });
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const factor = event.key === "-" ? 2 : 0.5;
      const left = at - at * factor;
      const range = [left, left + width * factor].map((position) => this.plot.posToVal(position, "x"));
      const [low, high] = this.extent("x");
      const next = [Math.max(range[0], low), Math.min(range[1], high)];
      this.setZoom(next[0] <= low && next[1] >= high ? null : next);
    } else if (event.key === "0" || event.key === "Escape") {
      this.setZoom(null);
    } else {
      return;
    }
    event.preventDefault();
  }
}

function point(u, index) {
  const dot = document.createElement("div");
  dot.className = "u-cursor-pt";
  dot.style.background = u.series[index].stroke(u, index);
  dot.style.width = dot.style.height = "8px";
  dot.style.marginLeft = dot.style.marginTop = "-4px";
  return dot;
}

// A logarithmic scale has no place for zero and below.
function positiveOnly(curve, { logx, logy }) {
  if (!logx && !logy) return curve;
  const keep = curve.x.map((x, index) => (!logx || x > 0) && (!logy || curve.y[index] > 0));
  const pick = (values) => values?.filter((_, index) => keep[index]);
  const low = pick(curve.low)?.map((value, index) => (logy && value <= 0 ? pick(curve.y)[index] : value));
  return { ...curve, x: pick(curve.x), y: pick(curve.y), low, high: pick(curve.high) };
}

// One table of all lines; x that a line does not have are undefined, over which uPlot connects its points.
function table(lines, extent) {
  if (!lines.length) return [extent];
  return uPlot.join(lines.map((line) => (line.low ? [line.x, line.y, line.high, line.low] : [line.x, line.y])));
}

function logTicks(min, max) {
  const ticks = [];
  const factors = max / min > 1e5 ? [1] : max / min > 20 ? [1, 3] : max / min > 4 ? [1, 2, 3, 5, 7] : null;
  if (factors === null) {
    const rough = (max - min) / 7;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * unit >= rough) * unit;
    for (let tick = Math.ceil(min / step) * step; tick <= max; tick += step) ticks.push(+tick.toPrecision(12));
    return ticks;
  }
  for (let power = Math.floor(Math.log10(min)); 10 ** power <= max; power++) {
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= min && tick <= max) ticks.push(tick);
    }
  }
  return ticks;
}
