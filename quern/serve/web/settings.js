// The page's settings: how tokens are chosen, what is recorded, and how the page looks. They are kept in the browser;
// the API key only until the tab is closed.

import { byId, el } from "./dom.js";

const KEPT = "quern-settings";
const KEY = "quern-key";

// An empty field is left out of requests: the server's own value applies.
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, null, "0 always takes the likeliest token"],
  ["max_tokens", "Longest reply", { min: 1, step: 1 }, 256, "in tokens"],
  ["top_k", "Top k", { min: 0, step: 1 }, null, "choose among so many tokens; 0 for all"],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }, null, "choose among the likeliest with this share"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }, null, "leave out below this share of the likeliest"],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, max: 100, step: 0.05 }, null, "1 is none"],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }, null, "for tokens that were written"],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }, null, "for each time they were written"],
  ["seed", "Seed", { step: 1 }, null, "the same seed gives the same reply"],
];
const WIDE = ["temperature", "max_tokens"];
const SAMPLING = NUMBERS.map(([name]) => name).filter((name) => name !== "max_tokens");
const ALTERNATIVES = [0, 5, 10, 20];
const THEMES = ["auto", "light", "dark"];

export const settings = {
  ...Object.fromEntries(NUMBERS.map(([name, , , value]) => [name, value])),
  stop: "",
  alternatives: 10,
  theme: "auto",
  key: "",
};
const DEFAULTS = { ...settings };
let kept = {}; // what the user had changed before

/** Reads what was kept; whatever is not a value of this table is dropped. */
export function load() {
  Object.assign(settings, DEFAULTS, { key: settings.key });
  kept = {};
  try {
    settings.key = sessionStorage.getItem(KEY) ?? "";
    kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    // Storage is switched off, or another program wrote there: begin with the defaults.
  }
  for (const [name] of NUMBERS) if (kept[name] === null || Number.isFinite(kept[name])) settings[name] = kept[name];
  if (typeof kept.stop === "string") settings.stop = kept.stop;
  if (ALTERNATIVES.includes(kept.alternatives)) settings.alternatives = kept.alternatives;
  if (THEMES.includes(kept.theme)) settings.theme = kept.theme;
  const given = new URLSearchParams(location.hash.slice(1)).get("key"); // the link of `quern serve --lan`
  if (given !== null) {
    settings.key = given;
    history.replaceState(history.state, "", location.pathname); // so that nobody reads it over a shoulder, or copies it
    return keep();
  }
  paint();
}

/** Takes the server's first values for the fields that the user has not changed. */
export function begin(sampling) {
  for (const [name, value] of Object.entries(sampling)) {
    if (settings[name] === DEFAULTS[name] && !(name in kept)) settings[name] = value;
    DEFAULTS[name] = value;
  }
  fill();
}

function keep() {
  const { key } = settings;
  // A default may be the page's own yet: a field that the user has cleared equals it, and stays cleared.
  const own = ([name, value]) => name !== "key" && (name in kept || value !== DEFAULTS[name]);
  const others = Object.fromEntries(Object.entries(settings).filter(own));
  try {
    localStorage.setItem(KEPT, JSON.stringify(others));
    sessionStorage.setItem(KEY, key);
  } catch {
    // Storage is switched off or full: the settings last as long as the page.
  }
  paint();
}

function paint() {
  document.documentElement.dataset.theme = settings.theme;
}

/** The fields of a request for a reply, those with a value. */
export function sampling() {
  const found = {};
  for (const name of SAMPLING) if (settings[name] !== null) found[name] = settings[name];
  if (settings.max_tokens !== null) found.max_tokens = settings.max_tokens;
  const stops = settings.stop.split("\n").filter((line) => line !== "");
  if (stops.length > 0) found.stop = stops;
  return found;
}

function row(name, label, hint, input, why = null) {
  const id = `set-${name}`;
  input.id = id;
  if (hint !== null) input.setAttribute("aria-describedby", `${id}-hint`);
  const text = el("label", { for: id, text: label });
  return el("div", { class: "setting" }, text, input, hint === null ? null : el("span", { id: `${id}-hint`, class: "hint", text: hint }), why);
}

/** Why a field's value is not taken; "" if it is. */
function fault(input, { min, max, step }) {
  const { badInput, rangeUnderflow, rangeOverflow } = input.validity;
  const whole = step !== 1 || input.value === "" || Number.isInteger(input.valueAsNumber);
  if (!badInput && !rangeUnderflow && !rangeOverflow && whole) return "";
  const range = min === undefined ? "" : max === undefined ? `, ${min} or more` : ` from ${min} to ${max}`;
  return `Give a ${step === 1 ? "whole " : ""}number${range}`;
}

function numberInput(name, limits) {
  const why = el("span", { id: `set-${name}-why`, class: "why", role: "alert", hidden: true });
  const input = el("input", {
    type: "number",
    inputmode: "decimal",
    placeholder: "server's own",
    ...limits,
    oninput: () => {
      const wrong = fault(input, limits);
      const used = settings[name] === null ? "the server's own value is used" : `${settings[name]} is used`;
      why.hidden = wrong === "";
      why.textContent = wrong === "" ? "" : `${wrong}; until then, ${used}.`;
      if (wrong === "") input.removeAttribute("aria-invalid");
      else input.setAttribute("aria-invalid", "true");
      if (wrong !== "") return;
      settings[name] = input.value === "" ? null : input.valueAsNumber;
      keep();
    },
  });
  input.setAttribute("aria-errormessage", why.id);
  return [input, why];
}

function select(name, options, read) {
  return el(
    "select",
    { onchange: (event) => { settings[name] = read(event.target.value); keep(); } },
    ...options.map(([value, text]) => el("option", { value, text })),
  );
}

/** Builds the fields of the settings dialog. */
export function build() {
  const numbers = NUMBERS.map(([name, label, limits, , hint]) => [name, row(name, label, hint, ...numberInput(name, limits))]);
  byId("settings-common").append(...numbers.filter(([name]) => WIDE.includes(name)).map(([, made]) => made));
  const stop = el("textarea", { rows: 2, oninput: (event) => { settings.stop = event.target.value; keep(); } });
  byId("settings-more").append(
    ...numbers.filter(([name]) => !WIDE.includes(name)).map(([, made]) => made),
    row("stop", "Stop texts", "one in each line, up to 4", stop),
  );
  const counts = ALTERNATIVES.map((count) => [count, count === 0 ? "none" : `${count} likeliest`]);
  byId("settings-page").append(
    row("alternatives", "Recorded for x-ray", "alternatives kept with each token; none: no x-ray", select("alternatives", counts, Number)),
    row("theme", "Colours", null, select("theme", [["auto", "system"], ["light", "light"], ["dark", "dark"]], String)),
    row("key", "API key", "if the server asks for one; forgotten with the tab", el("input", {
      type: "password",
      autocomplete: "off",
      oninput: (event) => { settings.key = event.target.value; keep(); },
    })),
  );
  byId("settings-reset").addEventListener("click", () => {
    Object.assign(settings, DEFAULTS, { key: settings.key });
    kept = {};
    keep();
    fill();
  });
  // What another tab keeps holds here, too; a link that is opened in this tab brings its key.
  for (const event of ["storage", "hashchange"]) window.addEventListener(event, () => { load(); fill(); });
  fill();
}

function fill() {
  for (const [name, value] of Object.entries(settings)) {
    const input = byId(`set-${name}`);
    input.value = value ?? "";
    input.removeAttribute("aria-invalid");
    const why = byId(`set-${name}-why`);
    if (why !== null) why.hidden = true;
  }
}
