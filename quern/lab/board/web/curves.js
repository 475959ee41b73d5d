// Pure functions on curves: interpolation, smoothing, groups with mean and band, and how numbers are written.

export const MOST_LINES = 12; // colours × dashes
const GRID = 300; // positions at which a group's mean is computed where its runs share no x

// A number with few significant digits; ten thousand and more with a suffix.
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(2).replace("e+", "e");
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit && size >= 1e4) return `${+(value / unit).toPrecision(digits)}${suffix}`;
  }
  if (size >= 1000 && Number.isInteger(value)) return value.toLocaleString("en");
  return size !== 0 && size < 1e-4 ? value.toExponential(2) : String(+value.toPrecision(digits));
}

// A measured value for a column: four decimals, so that the values of a column align.
export function decimal(value) {
  if (typeof value !== "number") return "";
  const size = Math.abs(value);
  return size >= 1e-3 && size < 100 ? value.toFixed(4) : size < 1e-3 && size >= 1e-4 ? value.toFixed(5) : number(value);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} d`;
}

// Exponential moving average, divided by its weights' sum so that the beginning is not pulled to zero.
export function smoothed(ys, amount) {
  if (!amount) return ys;
  let mean = 0, weight = 0;
  return ys.map((y) => {
    mean = amount * mean + (1 - amount) * y;
    weight = amount * weight + (1 - amount);
    return mean / weight;
  });
}

// The value at x between two points; null outside of the curve.
export function valueAt(xs, ys, x) {
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  if (xs[high] === xs[low] || x === xs[low]) return ys[low];
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

// The mean over runs and one standard deviation to both sides, where at least half of the runs have a value.
export function groupLine(curves, log) {
  const every = new Set(curves.flatMap((curve) => curve.x));
  let grid = [...every].sort((a, b) => a - b);
  if (grid.length > GRID) {
    const [first, last] = [grid[0], grid[grid.length - 1]];
    const along = log && first > 0 ? (t) => first * (last / first) ** t : (t) => first + (last - first) * t;
    grid = Array.from({ length: GRID }, (_, index) => (index === GRID - 1 ? last : along(index / (GRID - 1))));
  }
  const line = { x: [], y: [], low: [], high: [], n: [] };
  for (const x of grid) {
    const values = curves.map((curve) => valueAt(curve.x, curve.y, x)).filter((value) => value !== null);
    if (values.length < curves.length / 2) continue;
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
    const deviation = values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0;
    line.x.push(x); line.y.push(mean); line.low.push(mean - deviation); line.high.push(mean + deviation);
    line.n.push(values.length);
  }
  return line;
}

// A recipe field as text, for groups, filters and the diff.
export function fieldText(value) {
  if (value === undefined) return "—";
  if (Array.isArray(value)) return value.map(fieldText).join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}

const SEEDS = new Set(["seed", "data_seed"]);

// The group of a run. by: "" for none, "*" for all fields but the seeds, or a field.
export function groupOf(run, by, constant) {
  if (by === "*") {
    const derived = (name) => SEEDS.has(name) || name.replace("model.", "") !== name && name.replace("model.", "") in run.recipe;
    const parts = Object.entries(run.recipe).filter(([name]) => !derived(name)).sort(([a], [b]) => (a < b ? -1 : 1));
    return parts.map(([name, value]) => `${name.split(".").pop()} ${fieldText(value)}`).join(", ") || "one recipe";
  }
  return by.startsWith("@") ? run[by.slice(1)] : fieldText(run.recipe[by] ?? constant[by]);
}

// Whether a run passes a filter: every word is in its name, stage or status, or is field=value.
export function passes(run, words, constant) {
  const text = `${run.run} ${run.stage} ${run.status}`.toLowerCase();
  return words.every((word) => {
    const [name, value] = word.split("=");
    if (value === undefined) return text.includes(word);
    const field = Object.keys({ ...constant, ...run.recipe }).find((one) => one.toLowerCase() === name || one.toLowerCase().endsWith(`.${name}`));
    return field !== undefined && fieldText(run.recipe[field] ?? constant[field]).toLowerCase() === value;
  });
}
