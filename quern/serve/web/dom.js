// Builds elements. Text is only ever set as text: nothing in this file parses markup.

/** An element. props: attributes; "class", "text", "data" and "on…" listeners are meant as such; null leaves one out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** An icon of index.html's sprite. It says nothing to a screen reader: its button has a label. */
export function icon(name) {
  const image = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  image.setAttribute("class", "icon");
  image.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  image.append(use);
  return image;
}

export function iconButton(name, label, onclick, props = {}) {
  return el("button", { type: "button", class: "icon-button", title: label, "aria-label": label, onclick, ...props }, icon(name));
}

/** Fills a box again; the focus stays on the button of the same name, of the same item of a list, or else in the box. */
export function refill(box, ...children) {
  const name = (one) => [one.closest("li")?.dataset.id, one.getAttribute("aria-label") ?? one.textContent].join();
  const held = box.contains(document.activeElement) ? name(document.activeElement) : null;
  box.replaceChildren(...children);
  if (held !== null) [...box.querySelectorAll("button")].concat(box).find((one) => one === box || name(one) === held).focus();
}

export const byId = (id) => document.getElementById(id);

/** Random enough for names that are made in one browser; crypto.randomUUID exists on secure origins only. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(10))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Copies text, also where the origin is not secure and the page may not use the clipboard's own interface. */
export async function copy(text) {
  if (navigator.clipboard !== undefined) {
    try {
      return await navigator.clipboard.writeText(text);
    } catch (error) {
      if (error.name !== "NotAllowedError") throw error;
    }
  }
  const focused = document.activeElement;
  const field = el("textarea", { class: "sr-only", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  focused?.focus();
}

/** Tells it to a screen reader. */
export function announce(text) {
  byId("status").textContent = text;
}

let toastTimer = 0;

/** A line at the bottom for some seconds, with a button if there is something to do about it. */
export function toast(text, action = null, run = null) {
  const box = byId("toast");
  box.replaceChildren(el("span", { text }));
  if (action !== null) {
    box.append(el("button", { type: "button", class: "text-button", text: action, onclick: () => { box.hidden = true; run(); } }));
  }
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { box.hidden = true; }, action === null ? 4000 : 10000);
}
