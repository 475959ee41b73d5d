// A text that grows, as Markdown, at a cost per frame that does not grow with it: the text is cut at paragraphs, a
// finished block is rendered once, and only the open one at the end again. Long code and long paragraphs that are still
// open are appended as text. The cuts depend on the text alone, so a kept reply looks like the one that was streamed.

import { el } from "./dom.js";
import { codeBox, render } from "./markdown.js";

const LONG = 2000; // characters of an open block from which lists are cut, and text is appended unrendered
const CHUNK = 4000; // characters of code in one box of lines: only the last box is laid out again
const FENCE = /^ {0,3}(`{3,}|~{3,})([^\n`]*)(\n|$)/;
const ITEM = /^(?:[-*+]|\d{1,9}[.)])\s/;

/** The end of the first block of `text`, from `start`; -1 while it may still grow. */
export function blockEnd(text, start) {
  const opened = FENCE.exec(text.slice(start, start + 200));
  if (opened !== null) {
    const [, marks] = opened;
    const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*$`, "m");
    const from = start + opened[0].length;
    const found = closing.exec(text.slice(from));
    const end = found === null ? -1 : text.indexOf("\n", from + found.index + found[0].length);
    return end < 0 ? -1 : end + 1;
  }
  let blank = false;
  for (let line = start; line < text.length; ) {
    const end = text.indexOf("\n", line);
    if (end < 0 && !blank) return -1;
    const content = end < 0 ? text.slice(line) : text.slice(line, end);
    const empty = content.trim() === "";
    const item = ITEM.test(content);
    if (line > start && !empty) {
      const whole = end >= 0 || content.length > 12; // long enough to tell an item from a paragraph
      if (FENCE.test(content) && end >= 0) return line;
      if (blank && whole && !/^\s/.test(content) && (!item || line - start > LONG)) return line;
      if (item && end >= 0 && line - start > LONG) return line;
    }
    if (end < 0) return -1;
    blank = empty;
    line = end + 1;
  }
  return -1;
}

export class MarkdownView {
  constructor(box) {
    this.box = box;
    this.done = 0; // characters in finished blocks
    this.open = null; // the element of the open block
    this.code = null; // the open code: {code, written}
    this.tail = null; // the text node behind a long open block
    this.shown = 0; // characters of the open block that are rendered
  }

  /** Shows a text that begins with the one that was shown before. final: it will not grow. */
  update(text, final) {
    for (let end; (end = blockEnd(text, this.done)) >= 0; this.done = end) this.close(text.slice(this.done, end));
    const rest = text.slice(this.done);
    if (final) {
      if (rest.trim() !== "" || this.open !== null) this.close(rest);
      this.done = text.length;
    } else if (rest.trim() !== "") {
      this.grow(rest);
    }
  }

  close(text) {
    const block = el("div", { class: "block" });
    block.append(render(text));
    if (this.open === null) this.box.append(block);
    else this.open.replaceWith(block);
    this.open = this.code = this.tail = null;
    this.shown = 0;
  }

  grow(text) {
    if (this.open === null) {
      this.open = el("div", { class: "block" });
      this.box.append(this.open);
    }
    const fence = FENCE.exec(text.slice(0, 200));
    if (fence !== null && fence[3] === "\n") return this.growCode(text.slice(fence[0].length), fence[2].trim().split(/\s/)[0]);
    if (text.length <= LONG) {
      this.open.replaceChildren(render(text));
      this.tail = null;
      this.shown = text.length;
      return;
    }
    if (this.tail === null) {
      this.tail = document.createTextNode("");
      this.open.append(el("p", { class: "plain" }, this.tail));
    }
    this.tail.appendData(text.slice(this.shown));
    this.shown = text.length;
  }

  growCode(text, language) {
    if (this.code === null) {
      const { box, code } = codeBox(language);
      this.open.replaceChildren(box);
      this.code = { code, written: 0, last: null };
    }
    const { code } = this.code;
    let more = text.slice(this.code.written);
    this.code.written = text.length;
    while (more !== "") {
      if (this.code.last === null) {
        this.code.last = document.createTextNode("");
        code.append(el("span", { class: "lines" }, this.code.last));
      }
      // A box of lines ends with a line, so its end is no line break of its own.
      const cut = this.code.last.length > CHUNK ? more.indexOf("\n") + 1 : 0;
      this.code.last.appendData(cut > 0 ? more.slice(0, cut) : more);
      more = cut > 0 ? more.slice(cut) : "";
      if (cut > 0) this.code.last = null;
    }
  }
}
