// One message on the page: its text, calls, tokens, figures and buttons. It is told what to show, and keeps no state of
// the conversation.

import { byId, copy, el, icon, iconButton, refill, toast } from "./dom.js";
import { MarkdownView } from "./stream.js";
import { siblings, textOf } from "./tree.js";
import { TokenView } from "./xray.js";

export class MessageView {
  /** page: what the message can ask for; see app.js. */
  constructor(page, conversation, node) {
    Object.assign(this, { page, conversation, node });
    this.tokens = null; // the reply's tokens, where they are known
    this.parts = []; // what is shown of each part
    this.measure = null;
    this.editor = null; // the field in which the message is edited
    this.body = el("div", { class: "body" });
    this.bar = el("div", { class: "bar-line" });
    const mine = node.role === "user";
    const label = conversation.mode === "text" ? (mine ? "Your text" : "Continuation") : mine ? "You" : "Reply";
    this.box = el("article", { class: `message ${node.role}`, tabindex: -1, "aria-label": label, data: { node: node.id } }, this.body, this.bar);
    this.refresh();
  }

  /** Draws everything again: another x-ray, or a changed message. */
  async refresh() {
    this.measure = this.node.role === "assistant" ? this.page.measure() : null;
    const live = this.page.live(this.node);
    if (this.measure !== null && live === null && this.tokens === null) {
      this.tokens = (await this.page.tokens(this.node)) ?? [];
    }
    this.body.replaceChildren();
    this.parts = [];
    this.note = null;
    if (this.measure !== null) this.body.append(this.promptBox());
    this.update(live === null);
  }

  /** Shows what the node has now. final: nothing more will come. */
  update(final) {
    const live = this.page.live(this.node);
    if (live !== null) this.tokens = live.tokens;
    this.box.classList.toggle("waiting", !final);
    this.box.setAttribute("aria-busy", String(!final));
    const { parts } = this.node;
    if ((this.node.skipped > 0 || this.node.cut > 0) && this.note === null) this.body.prepend((this.note = this.skippedNote()));
    for (let index = 0; index < parts.length; index++) this.updatePart(index, final || index < parts.length - 1);
    if (final && this.editor === null) this.drawBar();
  }

  updatePart(index, final) {
    const part = this.node.parts[index];
    const shown = (this.parts[index] ??= this.makePart(index));
    if (shown.final) return;
    if (part.type === "text" && shown.tokens) this.updateTokens(shown, index);
    else if (part.type === "text" && shown.markdown) shown.markdown.update(part.text, final);
    else if (shown.plain.data !== part.text) {
      shown.plain.appendData(part.text.slice(shown.plain.length));
      if (shown.short) shown.short.textContent = part.text;
    }
    shown.final = final;
  }

  makePart(index) {
    const part = this.node.parts[index];
    if (part.type !== "text") return this.makeCall(index);
    const box = el("div", { class: "text" });
    this.body.append(box);
    const recorded = part.text === "" || this.tokens?.some((token) => token.part === index);
    if (this.measure !== null && recorded) {
      const branch = (place, token) => this.page.branch(this.node, index, place, token);
      return { tokens: new TokenView(box, "Tokens of the reply", { branch }) };
    }
    if (this.measure !== null) this.body.insertBefore(el("p", { class: "hint", text: "No probabilities were recorded for this reply." }), box);
    if (this.node.role === "assistant" && this.conversation.mode === "chat") {
      box.classList.add("markdown");
      return { markdown: new MarkdownView(box) };
    }
    box.classList.add("plain");
    const plain = document.createTextNode("");
    box.append(plain);
    return { plain };
  }

  updateTokens(shown, index) {
    const tokens = this.node.parts.length === 1 ? this.tokens : this.tokens.filter((token) => token.part === index);
    shown.tokens.update(tokens, this.measure);
  }

  /** A card for a call; its result is the next part, which is shown in the same card. */
  makeCall(index) {
    const plain = document.createTextNode("");
    const short = el("code");
    const card = this.parts[index - 1]?.card;
    if (this.node.parts[index].type === "output" && card !== undefined) {
      card.result.append(plain);
      card.line.append(icon("arrow"), short);
      return { plain, short };
    }
    const result = el("code");
    const line = el("span", { class: "call-line" }, short);
    const summary = el("summary", {}, icon("tool"), el("span", { class: "call-name", text: "Calculator" }), line);
    const asked = el("dd", {}, el("code", {}, plain));
    const list = el("dl", {}, el("dt", { text: "asked" }), asked, el("dt", { text: "answered" }), el("dd", {}, result));
    this.body.append(el("details", { class: "call" }, summary, list));
    return { plain, short, card: { result, line } };
  }

  repaint(measure) {
    this.measure = measure;
    for (const shown of this.parts) shown.tokens?.repaint(measure);
    this.promptView?.repaint(measure);
  }

  skippedNote() {
    const { skipped, cut } = this.node;
    const what = cut > 0 || this.conversation.mode === "text" ? `first ${cut || skipped} tokens` : `oldest ${skipped} messages`;
    return el("p", { class: "note", text: `The model's context is full: the ${what} were left out.` });
  }

  /** The prompt's own tokens, read when they are asked for. */
  promptBox() {
    const inside = el("div", {}, el("p", { class: "hint", text: "Reading…" }));
    this.promptLine = el("summary", { text: "What the model read" });
    const box = el("details", { class: "prompt" }, this.promptLine, inside);
    box.addEventListener("toggle", async () => {
      if (!box.open || this.promptView) return;
      try {
        const tokens = await this.page.promptTokens(this.node);
        const holder = el("div", {});
        const branch = this.page.promptBranch(this.node, tokens);
        this.promptView = new TokenView(holder, "Tokens of the prompt", { cached: this.node.stats?.cached ?? 0, branch });
        this.promptView.update(tokens, this.measure);
        inside.replaceChildren(holder);
      } catch (error) {
        inside.replaceChildren(el("p", { class: "error", text: error.message }));
      }
    });
    this.promptView = null;
    return box;
  }

  drawBar() {
    const { node, page } = this;
    const { stats } = node;
    if (this.promptLine && stats?.prompt !== undefined) {
      this.promptLine.textContent = `What the model read: ${stats.prompt} tokens, ${stats.cached ?? 0} of them from the prompt cache`;
    }
    const others = siblings(this.conversation, node);
    const at = others.indexOf(node);
    const items = [];
    if (others.length > 1) {
      const step = (by) => page.walk(others[at + by]);
      items.push(el("span", { class: "walk" },
        iconButton("left", "Previous version", () => step(-1), { disabled: at === 0 }),
        el("span", { text: `${at + 1} / ${others.length}`, "aria-label": `version ${at + 1} of ${others.length}` }),
        iconButton("right", "Next version", () => step(1), { disabled: at === others.length - 1 })));
    }
    items.push(iconButton("copy", "Copy", async () => { await copy(textOf(node)); toast("Copied."); }));
    if (node.role === "user") items.push(iconButton("edit", "Edit", () => this.edit()));
    else {
      items.push(iconButton("again", "Try again", () => page.regenerate(node)));
      const cut = node.finish === "length" || node.finish === "stopped";
      if (cut && node.parts.at(-1)?.type === "text") {
        const why = node.finish === "length" ? "The reply reached its longest length" : "The reply was stopped";
        items.push(el("button", { type: "button", class: "text-button", text: "Continue", title: why, onclick: () => page.goOn(node) }));
      }
      items.push(el("span", { class: "stats", text: describe(node) }));
    }
    refill(this.bar, ...items);
  }

  /** Live figures, in the place of the finished ones. */
  drawLive(live) {
    if (this.stats === undefined || !this.stats.isConnected) {
      this.stats = el("span", { class: "stats" });
      this.bar.replaceChildren(this.stats);
    }
    const waited = (performance.now() - live.started) / 1000;
    this.stats.textContent = live.first === null ? `reading the prompt · ${waited.toFixed(1)} s` : line(live.stats());
  }

  edit() {
    if (this.editor !== null) return this.editor.focus();
    const field = (this.editor = el("textarea", { "aria-label": "Edited message" }));
    field.value = textOf(this.node);
    const cancel = () => { this.editor = null; this.refresh(); this.bar.querySelector("[aria-label=Edit]").focus(); };
    const submit = () => {
      if (field.value.trim() !== "") this.page.edited(this.node, field.value);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); submit(); }
    });
    const buttons = el("div", { class: "edit-buttons" },
      el("button", { type: "button", class: "button", text: "Cancel", onclick: cancel }),
      el("button", { type: "button", class: "button main", text: "Send", onclick: submit }));
    this.body.replaceChildren(el("div", { class: "edit" }, field, buttons));
    this.bar.replaceChildren();
    field.style.height = `${Math.min(field.scrollHeight + 4, 400)}px`;
    field.focus();
  }
}

function line(stats) {
  const said = [`${stats.tokens} tokens`];
  if (stats.seconds > 0.05 && stats.tokens > 1) said.push(`${((stats.tokens - 1) / stats.seconds).toFixed(1)} tokens/s`);
  if (stats.first !== undefined) said.push(`first after ${stats.first.toFixed(2)} s`);
  return said.join(" · ");
}

function describe(node) {
  const { stats } = node;
  if (!stats || stats.tokens === undefined) return "";
  const said = byId("model").hidden || !node.model ? [line(stats)] : [node.model, line(stats)];
  if (stats.cached > 0) said.push(`${stats.cached} of ${stats.prompt} prompt tokens cached`);
  if (node.finish === "length") said.push("cut at the longest length");
  if (node.finish === "stopped") said.push("stopped");
  return said.join(" · ");
}
