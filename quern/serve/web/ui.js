// The page's fixed parts: the field to write in, the dialogs, the x-ray's legend, keys, and following a reply.

import { byId, el } from "./dom.js";
import { MEASURES, card } from "./xray.js";

const KEYS = [
  ["Enter", "send"],
  ["Shift Enter", "a new line"],
  ["↑ in an empty field", "edit your last message"],
  ["Esc", "stop the reply; close what is open"],
  ["Ctrl K", "search conversations"],
  ["Ctrl Shift O", "new conversation"],
  ["Ctrl Shift X", "token x-ray"],
  ["Ctrl B", "show or hide the list"],
  ["Ctrl ,", "settings"],
  ["Ctrl /", "this list"],
];
const NEAR = 60; // pixels from the end within which the page follows a reply
const HINTS = {
  chat: "The model answers your messages.",
  text: "The model goes on where your text ends, as a base model does. It neither answers nor calls tools.",
};
const TITLES = { chat: "What shall we talk about?", text: "Begin a text" };

let on = null; // what the page does: see `prepare`
let chosen = null; // the x-ray's measure, or null
let following = true;

export const measure = () => chosen;

/** Wires the fixed parts. actions: send(text), stop(), start(), busy(), conversation(), and others of app.js. */
export function prepare(actions) {
  on = actions;
  const input = byId("input");
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!on.send(input.value)) return;
    input.value = "";
    fit();
  });
  input.addEventListener("input", fit);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      byId("form").requestSubmit();
    } else if (event.key === "ArrowUp" && input.value === "" && !on.busy()) {
      event.preventDefault();
      on.editLast();
    }
  });
  byId("stop").addEventListener("click", on.stop);
  byId("new").addEventListener("click", on.start);
  byId("export").addEventListener("click", on.exportAll);
  byId("import").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", async (event) => {
    if (event.target.files.length > 0) await on.importFile(event.target.files[0]);
    event.target.value = "";
  });
  byId("system").addEventListener("input", (event) => on.setSystem(event.target.value));
  for (const radio of document.querySelectorAll("input[name=mode]")) {
    radio.addEventListener("change", () => on.setMode(radio.value));
  }
  prepareDialogs();
  prepareMeasures();
  prepareFollowing();
  document.addEventListener("keydown", onKey);
  // No handler sees the keys of an input method. In Safari, the key that ends a composition has only the code 229.
  window.addEventListener("keydown", (event) => {
    if (event.isComposing || event.keyCode === 229) event.stopPropagation();
  }, true);
}

function prepareDialogs() {
  byId("settings-open").addEventListener("click", openSettings);
  byId("shortcuts-open").addEventListener("click", () => byId("shortcuts").showModal());
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
    // A click outside of the dialog's box is one on the dialog itself, whose box has no padding.
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }
  const keys = KEYS.map(([key, does]) => el("div", {}, el("dt", {}, ...key.split(" ").map((one, index) =>
    /^[a-z]/.test(one) ? el("span", { text: ` ${one}` }) : el("kbd", { text: one, class: index > 0 ? "next" : null }))), el("dd", { text: does })));
  byId("keys").append(...keys);
}

function openSettings() {
  byId("system").value = on.conversation().system;
  byId("system-box").hidden = on.conversation().mode === "text";
  byId("settings").showModal();
}

function prepareMeasures() {
  const select = byId("measure");
  select.append(...Object.entries(MEASURES).map(([value, { label }]) => el("option", { value, text: label.toLowerCase() })));
  select.addEventListener("change", () => setMeasure(select.value));
  byId("xray").addEventListener("click", () => setMeasure(chosen === null ? select.value : null));
}

function setMeasure(name) {
  const again = name === null || chosen === null;
  chosen = name;
  card.hide();
  byId("xray").setAttribute("aria-pressed", String(name !== null));
  byId("legend").hidden = name === null;
  document.body.classList.toggle("xrayed", name !== null);
  if (name !== null) {
    byId("scale-low").textContent = MEASURES[name].low;
    byId("scale-high").textContent = MEASURES[name].high;
  }
  on.measured(again);
}

function prepareFollowing() {
  const view = byId("conversation");
  let [top, height] = [0, 0];
  view.addEventListener("scroll", () => {
    const near = isNearEnd(view);
    // Only a reader scrolls up while the content stays: messages that come into view change their height.
    if (near && view.scrollTop >= top) following = true;
    else if (!near && view.scrollTop < top && view.scrollHeight === height) following = false;
    [top, height] = [view.scrollTop, view.scrollHeight];
    byId("to-end").hidden = following || near;
  }, { passive: true });
  // While a reply arrives, its height may change with every scroll event: wheel and finger tell what the reader wants.
  const scrollsUp = () => view.scrollTop > 0 && follow(false);
  let finger = 0;
  view.addEventListener("wheel", (event) => { if (event.deltaY < 0) scrollsUp(); }, { passive: true });
  view.addEventListener("touchstart", (event) => { finger = event.touches[0].clientY; }, { passive: true });
  view.addEventListener("touchmove", (event) => {
    if (event.touches[0].clientY > finger) scrollsUp();
    finger = event.touches[0].clientY;
  }, { passive: true });
  new ResizeObserver(() => follow()).observe(byId("messages"));
  byId("to-end").addEventListener("click", () => follow(true));
}

const isNearEnd = (view) => view.scrollHeight - view.scrollTop - view.clientHeight < NEAR;

/** Scrolls to the end if the reader is there, and edits no message, or it is asked for; false: stays, from now on. */
export function follow(asked = following && !document.activeElement?.closest(".edit")) {
  following = asked;
  const view = byId("conversation");
  if (following) view.scrollTop = view.scrollHeight;
  byId("to-end").hidden = following || isNearEnd(view);
}

function onKey(event) {
  const command = event.ctrlKey || event.metaKey;
  const key = (event.key > "~" ? event.code.replace("Key", "") : event.key).toLowerCase(); // "ל" has the place of "k"
  const actions = {
    k: () => { if (byId("sidebar").inert || document.body.classList.contains("list-folded")) on.toggleList(); byId("search").focus(); byId("search").select(); },
    b: on.toggleList,
    ",": openSettings,
    "/": () => byId("shortcuts").showModal(),
  };
  const shifted = { o: on.start, x: () => byId("xray").click() };
  const open = document.querySelector("dialog[open]") !== null;
  if (command && !event.altKey && !open) {
    const run = (event.shiftKey ? shifted : actions)[key];
    if (run !== undefined) {
      event.preventDefault();
      run();
    }
  } else if (event.key === "Escape" && !open) {
    if (!byId("token-card").hidden) card.hide(true);
    else if (document.body.classList.contains("list-open")) on.toggleList();
    else on.stop();
  }
}

/** Shows Stop in the place of Send while a reply is written. */
export function busy(writing) {
  const focused = document.activeElement === byId(writing ? "send" : "stop");
  byId("stop").hidden = !writing;
  byId("send").hidden = writing;
  document.body.classList.toggle("busy", writing);
  if (focused) byId("input").focus();
}

/** How many tokens of the context are taken. */
export function fill(tokens, context) {
  byId("fill").hidden = tokens === 0 || context === 0;
  byId("fill").classList.toggle("full", tokens > 0.9 * context);
  byId("fill-text").textContent = `context: ${Math.min(tokens, context)} of ${context} tokens`;
  byId("fill-bar").firstElementChild.style.width = `${Math.min(100, (100 * tokens) / context)}%`;
}

/** A message about what went wrong, in the conversation; null takes it away. retry: offered as a button. */
export function problem(text, retry = null, label = "Try again") {
  const box = byId("problem");
  box.hidden = text === null;
  const button = retry === null ? null : el("button", { type: "button", class: "text-button", text: label, onclick: retry });
  box.replaceChildren(el("span", { text: text ?? "" }), ...(button === null ? [] : [button]));
  follow();
}

/** The field is as high as what is written in it. */
function fit() {
  const input = byId("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

/** Fits the fixed parts to a conversation. */
export function show(conversation, empty, title) {
  byId("welcome").hidden = !empty;
  byId("title").textContent = title;
  document.title = empty ? "quern" : `${title} – quern`;
  document.body.dataset.mode = conversation.mode;
  document.querySelector(`input[name=mode][value=${conversation.mode}]`).checked = true;
  byId("mode-hint").textContent = HINTS[conversation.mode];
  byId("welcome-title").textContent = TITLES[conversation.mode];
  const field = conversation.mode === "chat" ? "Message" : empty ? "The beginning of a text" : "Go on with a text of yours, or send nothing";
  byId("input").placeholder = field;
}

export function suggest(texts, choose) {
  byId("suggestions").replaceChildren(...texts.map((text) =>
    el("li", {}, el("button", { type: "button", text, onclick: () => choose(text) }))));
}
