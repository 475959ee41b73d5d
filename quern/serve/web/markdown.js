// Markdown to elements. Three guards, each enough by itself: markdown-it passes no HTML through, DOMPurify keeps the
// tags of this list only, and the server's content security policy runs no script but the page's own files.
//
// Math is MathML, made by Temml directly as elements after the cleaning: no markup of it is ever parsed.

import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import { copy, el, icon } from "./dom.js";

const { DOMPurify, temml } = globalThis; // of the scripts that index.html loads before
const TAGS = "p br hr h1 h2 h3 h4 h5 h6 strong em s code pre blockquote ul ol li table thead tbody tr th td a span".split(" ");
const MOST_MATH = 2000; // characters of a formula

const markdown = new MarkdownIt({ html: false, linkify: false, typographer: false, breaks: true });
markdown.validateLink = isWebAddress;

function isWebAddress(address) {
  return /^https?:\/\//i.test(address.trim());
}

// Cells have their alignment as a style attribute, which the policy forbids: a class says the same.
for (const rule of ["th_open", "td_open"]) {
  markdown.renderer.rules[rule] = (tokens, index, options, _, self) => {
    const style = tokens[index].attrGet("style");
    if (style !== null) tokens[index].attrs = [["class", style.replace("text-align:", "to-")]];
    return self.renderToken(tokens, index, options);
  };
}

// Nothing is loaded because a model wrote its address: an image is a link to itself.
markdown.renderer.rules.image = (tokens, index) => {
  const { escapeHtml } = markdown.utils;
  return `<a href="${escapeHtml(tokens[index].attrGet("src"))}">${escapeHtml(tokens[index].content || "image")}</a>`;
};

const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
// Scripts without spaces between words, such as Chinese, write formulas right beside their letters.
const LETTER = /[\p{N}\p{Script=Latin}\p{Script=Greek}\p{Script=Cyrillic}]/u;

/** Whether a dollar at `pos` can begin a formula: "5$" and "US$" are money. */
const opens = (src, pos) => pos === 0 || !(src[pos - 1] === "$" || LETTER.test(src[pos - 1]));

/** Whether the text from `start` to a dollar at `end` is a formula: as in pandoc, "$5 or $6" and "$A:$B" are none. */
function isFormula(src, start, end) {
  const after = src.slice(end + 1);
  return !/\s/.test(src[start]) && !/\s/.test(src[end - 1]) && (!LETTER.test(after[0] ?? "") || /^(th|s)\b/.test(after));
}

/** The first `close` from `start` that no backslash precedes; -1 without one. */
function find(src, close, start) {
  let end = src.indexOf(close, start);
  while (close[0] === "$" && end > start && src[end - 1] === "\\") end = src.indexOf(close, end + 1);
  return end;
}

markdown.inline.ruler.before("escape", "math", (state, silent) => {
  const { src, pos } = state;
  if (src[pos] === "$" && !opens(src, pos)) return false;
  for (const [open, close, display] of PAIRS) {
    if (!src.startsWith(open, pos)) continue;
    const start = pos + open.length;
    const end = find(src, close, start);
    const tex = src.slice(start, end).trim();
    if (end < 0 || tex === "" || tex.length > MOST_MATH) continue;
    if (open === "$" && !isFormula(src, start, end)) continue;
    if (!silent) {
      const token = state.push("math", "span", 0);
      token.content = tex;
      token.meta = { display };
    }
    state.pos = end + close.length;
    return true;
  }
  return false;
});
markdown.renderer.rules.math = (tokens, index) => {
  const kind = tokens[index].meta.display ? "math display" : "math";
  return `<span class="${kind}">${markdown.utils.escapeHtml(tokens[index].content)}</span>`;
};

/** The elements of a text. */
export function render(text) {
  const fragment = DOMPurify.sanitize(markdown.render(text), {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "class", "start"],
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of fragment.querySelectorAll("a")) {
    if (!isWebAddress(link.getAttribute("href") ?? "")) link.removeAttribute("href");
    link.rel = "noopener noreferrer nofollow";
    link.target = "_blank";
  }
  for (const span of fragment.querySelectorAll("span.math")) typeset(span);
  for (const pre of fragment.querySelectorAll("pre")) {
    const [, language = ""] = /^language-([\w+#.-]{1,20})/.exec(pre.querySelector("code")?.className) ?? [];
    codeBox(language, pre);
  }
  for (const box of fragment.querySelectorAll("ul, ol, blockquote, table")) box.dir = "auto"; // marks and columns, too
  for (const table of fragment.querySelectorAll("table")) {
    const box = el("div", { class: "table", role: "group", tabindex: 0, "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

/** Replaces a formula's TeX by MathML; TeX with an error stays as it was written. */
function typeset(span) {
  const tex = span.textContent;
  try {
    temml.render(tex, span, { displayMode: span.classList.contains("display"), throwOnError: true, trust: false, maxExpand: 200 });
  } catch {
    span.replaceChildren(el("code", { text: tex }));
  }
}

/** A box with a head, language and copy button, around `pre` in its place; without `pre`, around a new one. */
export function codeBox(language, pre = null) {
  const code = pre ?? el("pre", {}, el("code"));
  const label = el("span", { text: "Copy" });
  const button = el("button", { type: "button", class: "text-button copy-code" }, icon("copy"), label);
  button.addEventListener("click", async () => {
    await copy(code.textContent);
    label.textContent = "Copied";
    setTimeout(() => { label.textContent = "Copy"; }, 1500);
  });
  const head = el("div", { class: "code-head" }, el("span", { text: language || "text" }), button);
  const box = el("div", { class: "code" }, head);
  pre?.replaceWith(box);
  box.append(code);
  code.tabIndex = 0; // it scrolls: the keyboard must reach it
  return { box, code: code.querySelector("code") };
}
