// Token x-ray: every token coloured by its probability, its rank or the entropy of its place, with the alternatives
// that the model saw there. All numbers are the model's at temperature 1, before any setting of the sampling.

import { announce, byId, el } from "./dom.js";

export const MEASURES = {
  probability: { label: "Probability", low: "likely", high: "unlikely" },
  rank: { label: "Rank", low: "first choice", high: "far down" },
  entropy: { label: "Entropy", low: "certain", high: "open" },
};
const PROBABILITIES = [0.9, 0.6, 0.3, 0.1, 0.02]; // lower bounds of the classes 0 to 4
const RANKS = [1, 2, 3, 5, 10]; // upper bounds
const BITS = [0.25, 0.75, 1.5, 2.5, 4];
// Tokens of a run of spans: only the last run is laid out again. It ends at a line's end, or, in a long line, anyway.
const RUN = 64;
const LONGEST_RUN = 512;

export const probability = (token) => Math.exp(token.logprob);

/** The place of a token among the likeliest, from 1; null if it is not among those that were recorded. */
export function rank(token) {
  const place = token.top.findIndex((one) => one.id === token.id);
  return place < 0 ? null : place + 1;
}

/** Bits of entropy of the recorded alternatives, all others counted as one: a lower bound. Null if none was recorded. */
export function entropy(token) {
  if (token.top.length === 0) return null;
  const all = token.top.map(probability);
  const rest = 1 - all.reduce((sum, value) => sum + value, 0);
  return [...all, rest].reduce((sum, value) => (value > 1e-9 ? sum - value * Math.log2(value) : sum), 0);
}

/** 0, as expected, to 5, a surprise; null for a token without a probability. */
export function level(token, measure) {
  if (token.logprob === null) return null;
  const first = (fits) => (fits < 0 ? 5 : fits);
  if (measure === "probability") return first(PROBABILITIES.findIndex((bound) => probability(token) >= bound));
  if (measure === "entropy") return first(BITS.findIndex((bound) => (entropy(token) ?? 99) <= bound));
  return first(RANKS.findIndex((bound) => (rank(token) ?? 99) <= bound));
}

/** Text and bytes: bytes that are no whole character are written as such. */
export function shownText(token) {
  return token.text.startsWith("bytes:") ? token.bytes.map((byte) => `⟨${hex(byte)}⟩`).join("") : token.text;
}

const WHITE = { " ": "space", "\n": "line break", "\t": "tab" };

/** What a screen reader says for a token that has nothing to read; null for others. */
function spoken(text) {
  if (text.trim() !== "") return null;
  return text === "" ? "nothing" : [...text].map((one) => WHITE[one] ?? "white space").join(", ");
}

const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");
const percent = (value) => (value >= 0.9995 ? "100 %" : value >= 0.01 ? `${(100 * value).toFixed(1)} %` : `${(100 * value).toPrecision(1)} %`);
const quoted = (token) => `“${shownText(token).replace(/\n/g, "↵").replace(/\t/g, "⇥")}”`;
const isSpecial = (token) => /^<\|.+\|>$/.test(token.text);

/** Tokens as a list one can walk with the arrow keys. cached: of a prompt, so many at its start were not read again. */
export class TokenView {
  constructor(box, label, { cached = null, branch = null } = {}) {
    this.box = box;
    this.cached = cached;
    this.branch = branch; // (index, alternative) → begins a branch there; null where there is none
    this.tokens = [];
    this.spans = [];
    this.run = null;
    this.at = -1;
    this.name = `tokens-${(TokenView.made = (TokenView.made ?? 0) + 1)}`;
    box.classList.add("tokens");
    box.tabIndex = 0;
    box.setAttribute("role", "listbox");
    box.setAttribute("aria-label", label);
    box.addEventListener("keydown", (event) => this.onKey(event));
    box.addEventListener("focus", () => this.spans.length > 0 && this.focusOn(Math.max(this.at, 0)));
    box.addEventListener("blur", () => card.leave());
    box.addEventListener("pointerover", (event) => this.indexOf(event) >= 0 && card.show(this, this.indexOf(event), false));
    box.addEventListener("pointerleave", () => card.leave());
    box.addEventListener("click", (event) => {
      const index = this.indexOf(event);
      if (index >= 0) this.open(index);
    });
  }

  indexOf(event) {
    const index = event.target.dataset?.index;
    return index === undefined ? -1 : Number(index);
  }

  /** Shows a list of tokens that begins with the one that was shown before. */
  update(tokens, measure) {
    for (let index = this.spans.length; index < tokens.length; index++) {
      const token = tokens[index];
      const text = shownText(token);
      if (this.run === null) this.box.append((this.run = el("div", { class: "run", role: "group", "aria-label": "Tokens" })));
      const span = el("span", {
        role: "option",
        id: `${this.name}-${index}`,
        "aria-selected": "false",
        "aria-label": spoken(text),
        data: { index },
        text: text === "" ? "∅" : text,
      });
      this.spans.push(span);
      this.paint(span, token, index, measure);
      this.run.append(span);
      const length = this.run.childElementCount;
      if (length >= LONGEST_RUN || (length >= RUN && text.endsWith("\n"))) this.run = null;
    }
    this.tokens = tokens;
  }

  paint(span, token, index, measure) {
    const value = level(token, measure);
    span.className = `token ${value === null ? "unscored" : `level-${value}`}`;
    if (index < this.cached) span.classList.add("cached");
    if (isSpecial(token)) span.classList.add("special");
    if (/\n/.test(token.text)) span.classList.add("newline");
  }

  repaint(measure) {
    this.spans.forEach((span, index) => this.paint(span, this.tokens[index], index, measure));
  }

  onKey(event) {
    const moves = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10, Home: -Infinity, End: Infinity };
    if (event.key in moves) this.focusOn(Math.min(Math.max(this.at + moves[event.key], 0), this.spans.length - 1));
    else if ((event.key === "Enter" || event.key === " ") && this.at >= 0) this.open(this.at);
    else return;
    event.preventDefault();
  }

  focusOn(index) {
    this.spans[this.at]?.setAttribute("aria-selected", "false");
    this.at = index;
    const span = this.spans[index];
    span.setAttribute("aria-selected", "true");
    this.box.setAttribute("aria-activedescendant", span.id);
    span.scrollIntoView({ block: "nearest" });
    card.show(this, index, false);
    const { logprob } = this.tokens[index];
    announce(logprob === null ? "no probability" : `probability ${percent(Math.exp(logprob))}`); // an option has its text alone
  }

  open(index) {
    this.spans[this.at]?.setAttribute("aria-selected", "false");
    this.at = index;
    card.show(this, index, true);
  }
}

/** The card beside a token. A pinned one stays, has the focus and can be used; others follow the pointer. */
class Card {
  constructor() {
    this.timer = 0;
    this.pinned = false;
    this.view = null;
    this.box = byId("token-card");
  }

  show(view, index, pin) {
    if (this.pinned && !pin) return;
    clearTimeout(this.timer);
    this.view?.spans[this.index]?.classList.remove("chosen");
    Object.assign(this, { view, index, pinned: pin });
    const span = view.spans[index];
    span.classList.add("chosen");
    this.fill(view.tokens[index], index);
    this.box.hidden = false;
    this.box.classList.toggle("pinned", pin);
    this.place(span.getClientRects()[0] ?? span.getBoundingClientRect());
    if (pin) (this.box.querySelector("button:not(:disabled)") ?? this.box).focus();
  }

  place(at) {
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const below = at.bottom + 8 + height < window.innerHeight || at.top < height + 16;
    this.box.style.left = `${Math.max(8, Math.min(at.left, window.innerWidth - width - 8))}px`;
    this.box.style.top = `${Math.max(8, below ? Math.min(at.bottom + 6, window.innerHeight - height - 8) : at.top - height - 6)}px`;
  }

  leave() {
    if (this.pinned) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hide(), 160);
  }

  /** back: the focus returns to the tokens. */
  hide(back = false) {
    clearTimeout(this.timer);
    const { view, pinned } = this;
    view?.spans[this.index]?.classList.remove("chosen");
    Object.assign(this, { view: null, pinned: false });
    this.box.hidden = true;
    if (back && pinned) view?.box.focus();
    if (back && pinned) this.hide();
  }

  fill(token, index) {
    const place = rank(token);
    const bits = entropy(token);
    const cached = index < this.view.cached;
    const none = this.view.cached !== null && index === 0 ? "none: nothing stands before it" : "none was recorded";
    const facts = [
      ["id", token.id],
      ["bytes", token.bytes.map(hex).join(" ") || "none"],
      ["probability", token.logprob === null ? none : percent(probability(token))],
      ["rank", token.logprob === null ? null : place ?? `beyond ${token.top.length}`],
      ["entropy", bits === null ? null : `≥ ${bits.toFixed(2)} bits`],
      ["prompt cache", cached ? "known: not read again" : null],
    ].filter(([, value]) => value !== null);
    const title = bits === null ? null : `From the ${token.top.length} likeliest tokens, all others counted as one: a lower bound.`;
    const list = el("dl", {}, ...facts.flatMap(([name, value]) => [
      el("dt", { text: name, title: name === "entropy" ? title : null }),
      el("dd", { text: value }),
    ]));
    const most = Math.max(...token.top.map(probability), 0);
    const rows = token.top.map((one) => this.row(token, one, index, most));
    const note = this.view.branch === null ? "The likeliest tokens here" : "Choose another token to go on from there";
    this.box.replaceChildren(
      el("div", { class: "card-token", text: quoted(token) }),
      list,
      ...(rows.length > 0 ? [el("p", { class: "hint", text: note }), el("div", { class: "alternatives" }, ...rows)] : []),
    );
    this.box.setAttribute("aria-label", `Token ${quoted(token)}`);
  }

  row(token, one, index, most) {
    const share = percent(probability(one));
    const own = one.id === token.id;
    const bar = el("span", { class: "bar" });
    bar.style.width = `${(100 * probability(one)) / most}%`;
    const content = [bar, el("span", { class: "alternative-text", text: quoted(one) }), el("span", { class: "share", text: share })];
    const about = `id ${one.id}, bytes ${one.bytes.map(hex).join(" ") || "none"}`;
    if (this.view.branch === null) return el("div", { class: `alternative${own ? " own" : ""}`, title: about }, ...content);
    // A special token means something to the server, not to the text: only the end of a reply can be chosen.
    const possible = !own && (!isSpecial(one) || one.text === "<|assistant_end|>");
    const { branch } = this.view;
    return el("button", {
      type: "button",
      class: `alternative${own ? " own" : ""}`,
      title: about,
      disabled: !possible,
      "aria-label": `${quoted(one)}, ${share}, ${about}${own ? ", the token here" : ""}`,
      onclick: () => { this.hide(); branch(index, one); },
    }, ...content);
  }
}

export const card = new Card();

/** Wires the card's own events. */
export function prepare() {
  const { box } = card;
  box.addEventListener("pointerenter", () => clearTimeout(card.timer));
  box.addEventListener("pointerleave", () => card.leave());
  document.addEventListener("pointerdown", (event) => {
    if (card.pinned && !box.contains(event.target)) card.hide();
  });
  box.addEventListener("keydown", (event) => {
    const buttons = [...box.querySelectorAll("button:not(:disabled)")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step !== undefined && buttons.length > 0) {
      event.preventDefault();
      buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length].focus();
    }
    if (event.key === "Escape") {
      event.stopPropagation();
      card.hide(true);
    }
  });
  box.addEventListener("focusout", (event) => {
    if (card.pinned && !box.contains(event.relatedTarget) && event.relatedTarget !== null) card.hide();
  });
  byId("conversation").addEventListener("scroll", () => card.hide(), { passive: true });
}
