// The list of conversations: newest first, by day, searched as one types.

import { byId, el, iconButton, refill } from "./dom.js";
import { matches, titleOf } from "./tree.js";

const DAY = 86400000;
const NARROW = "(max-width: 760px)"; // as in base.css

function period(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "Last 7 days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}

export class Sidebar {
  /** page: {open(conversation), rename(conversation, title), remove(conversation), export(conversations)} */
  constructor(page) {
    this.page = page;
    this.renaming = null;
    byId("search").addEventListener("input", () => this.draw());
    byId("search").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.target.value === "") return;
      event.stopPropagation();
      event.target.value = "";
      this.draw();
    });
    byId("menu").addEventListener("click", () => this.toggle());
    byId("shade").addEventListener("click", () => this.toggle(false));
    window.matchMedia(NARROW).addEventListener("change", () => this.toggle(!this.isNarrow()));
    if (this.isNarrow()) this.toggle(false);
  }

  /** On a narrow screen, the list is over the conversation: opens or closes it there; elsewhere it folds it away. */
  toggle(open = !this.isOpen()) {
    const narrow = this.isNarrow();
    document.body.classList.toggle("list-open", narrow && open);
    document.body.classList.toggle("list-folded", !narrow && !open);
    byId("menu").setAttribute("aria-expanded", String(open));
    byId("sidebar").inert = !open;
    byId("main").inert = narrow && open;
    if (open && narrow) byId("search").focus();
  }

  isNarrow() {
    return window.matchMedia(NARROW).matches;
  }

  isOpen() {
    return this.isNarrow() ? document.body.classList.contains("list-open") : !document.body.classList.contains("list-folded");
  }

  draw(conversations = this.conversations, current = this.current) {
    Object.assign(this, { conversations: [...conversations], current });
    const box = byId("conversations");
    if (this.renaming !== null && box.querySelector("input") !== null) return; // drawn once the title is typed
    const query = byId("search").value;
    const found = this.conversations.filter((one) => matches(one, query)).sort((a, b) => b.updated - a.updated);
    const hint = query === "" ? "Conversations are kept in this browser only." : "Nothing found.";
    const lists = [...Map.groupBy(found, (one) => period(one.updated))].flatMap(([name, members]) =>
      [el("h2", { text: name }), el("ul", { "aria-label": name }, ...members.map((one) => this.item(one)))]);
    refill(box, ...(found.length > 0 ? lists : [el("p", { class: "hint", text: hint })]));
    byId("search-count").textContent = query === "" ? "" : `${found.length} found`;
  }

  item(conversation) {
    const chosen = conversation.id === this.current;
    const title = titleOf(conversation);
    if (this.renaming === conversation.id) return el("li", { data: { id: conversation.id } }, this.nameField(conversation, title));
    return el("li", { class: chosen ? "chosen" : null, data: { id: conversation.id } },
      el("button", {
        type: "button",
        class: "open",
        text: title,
        title,
        "aria-current": chosen ? "true" : null,
        ondblclick: () => this.rename(conversation),
        onclick: () => this.page.open(conversation),
      }),
      el("span", { class: "item-buttons" },
        iconButton("edit", `Rename ${title}`, () => this.rename(conversation)),
        iconButton("download", `Export ${title}`, () => this.page.export([conversation])),
        iconButton("bin", `Delete ${title}`, () => this.page.remove(conversation))));
  }

  rename(conversation) {
    this.renaming = conversation.id;
    this.draw();
    const field = byId("conversations").querySelector("input");
    field.focus();
    field.select();
  }

  nameField(conversation, title) {
    const done = (keep) => {
      if (this.renaming !== conversation.id) return;
      this.renaming = null;
      const name = field.value.replace(/\s+/g, " ").trim().slice(0, 200);
      field.ariaLabel = (keep && name) || title; // the button that gets the focus
      if (keep && name !== "" && name !== title) this.page.rename(conversation, name);
      this.draw();
    };
    const field = el("input", {
      type: "text",
      "aria-label": "Title",
      maxlength: 200,
      onblur: () => done(true),
      onkeydown: (event) => {
        if (event.key === "Enter") { event.preventDefault(); done(true); } // else the button that gets the focus is pressed
        if (event.key === "Escape") { event.stopPropagation(); done(false); }
      },
    });
    field.value = title;
    return field;
  }
}
