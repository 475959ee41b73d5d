// Asks for a reply and fills a node of the conversation with it. A reply to a chat comes from the chat endpoint. One
// that goes on from a given token is a completion of token ids: the server continues those as plain text, so any
// special token ends such a reply, and it calls no tool.

import { ApiError, events, post, readToken, tokenize } from "./api.js";
import { sampling, settings } from "./settings.js";
import { documentOf, messagesOf, path } from "./tree.js";

const ROOM = 0.75; // of the context, that a conversation which was too long may take
const TOO_LONG = ["context_length_exceeded", "request_too_large"]; // the server's codes
const CUT = { text: "skipped", chat: "cut" }; // the field of a node that counts the tokens which its prompt left out

export class Reply {
  /**
   * plan: {ids} for a continuation of these tokens, else {}: `node` answers the conversation before it. {leaf}: what was
   * shown before another try.
   * tokens: those that `node` begins with. onupdate: called after every piece, often many times a frame.
   */
  constructor({ model, context, conversation, node, plan, tokens, onupdate }) {
    Object.assign(this, { model, context, conversation, node, plan, tokens, onupdate });
    this.given = tokens.length;
    this.controller = new AbortController();
    this.started = performance.now();
    this.first = this.last = null; // times of the first and the last piece
    this.pieces = 0; // counted where the server tells no tokens
    this.usage = null;
  }

  stop() {
    this.controller.abort();
  }

  /** Seconds and tokens so far, as they are kept with the message. */
  stats() {
    const stats = { tokens: Math.max(this.tokens.length - this.given, this.pieces) };
    if (this.first !== null) {
      stats.first = (this.first - this.started) / 1000;
      stats.seconds = (this.last - this.first) / 1000;
    }
    if (this.usage !== null) {
      stats.tokens = this.usage.completion_tokens;
      stats.prompt = this.usage.prompt_tokens;
      stats.cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
    return stats;
  }

  /** Resolves when the reply has ended, also after stop(). Throws an Error for anything that went wrong. */
  async run() {
    try {
      for await (const event of events(await this.request())) this.take(event);
    } catch (error) {
      this.node.finish = "stopped"; // also by the server's end: it can be continued
      if (error.name !== "AbortError") throw error;
    } finally {
      this.node.stats = this.stats();
    }
  }

  take(event) {
    if (event.error) throw new ApiError(500, event.error);
    if (event.usage) this.usage = event.usage;
    for (const choice of event.choices) {
      const delta = choice.delta ?? { content: choice.text };
      if (delta.content) this.append("text", delta.content);
      for (const part of delta.parts ?? []) this.append(part.type, part.text);
      if (choice.finish_reason !== null) this.node.finish = choice.finish_reason;
      const at = Math.max(this.node.parts.findLastIndex((part) => part.type === "text"), 0);
      for (const token of choice.logprobs?.content ?? []) this.tokens.push(readToken(token, at));
    }
    this.onupdate();
  }

  append(type, text) {
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces++;
    const { parts } = this.node;
    const last = parts[parts.length - 1];
    if (last?.type === type) last.text += text;
    else parts.push({ type, text });
  }

  async request() {
    const common = { model: this.model, stream: true, stream_options: { include_usage: true }, ...sampling() };
    const recorded = settings.alternatives;
    const { signal } = this.controller;
    if (this.plan.ids === undefined && this.conversation.mode === "chat") {
      const scores = recorded > 0 ? { logprobs: true, top_logprobs: recorded } : {};
      const messages = messagesOf(this.conversation, this.node.parent, this.node.system);
      return this.fit(messages, (shorter) => post("/v1/chat/completions", { ...common, ...scores, messages: shorter }, signal));
    }
    const ids = this.plan.ids ?? (await tokenize(this.model, { prompt: documentOf(this.conversation, this.node.parent) }, signal));
    const scores = recorded > 0 ? { logprobs: recorded } : {};
    const body = { max_tokens: this.context, ...common, ...scores };
    const cut = ids.length < this.context ? 0 : ids.length - Math.floor(this.context * ROOM);
    const counter = CUT[this.conversation.mode];
    this.node[counter] = (this.node[counter] ?? 0) + cut;
    return post("/v1/completions", { ...body, prompt: without(ids, cut) }, signal);
  }

  /**
   * Where the user has agreed to it, leaves out the oldest exchanges while the server finds the messages too long, and
   * from the start those that the model's reply before left out: the server keeps what it read of a prompt that goes on.
   */
  async fit(messages, send) {
    const system = messages[0].role === "system" ? 1 : 0;
    const before = path(this.conversation, this.node.parent).findLast((node) => node.model === this.model);
    let skipped = (this.conversation.shortened && before?.skipped) || 0;
    for (;;) {
      const shorter = [...messages.slice(0, system), ...messages.slice(system + skipped)];
      try {
        const response = await send(shorter);
        this.node.skipped = skipped;
        return response;
      } catch (error) {
        const left = shorter.length - system;
        if (!TOO_LONG.includes(error.code) || left < 3) throw error;
        error.canShorten = !this.conversation.shortened;
        if (error.canShorten) throw error;
        const size = (message) => message.content.length + 20;
        const total = shorter.reduce((sum, message) => sum + size(message), 0);
        const target = total * (error.context === null ? 0.5 : Math.min(1, (ROOM * error.context) / error.promptTokens));
        let now = total;
        for (let dropped = 0; dropped + 2 < left && now > target; dropped += 2, skipped += 2) {
          now -= size(shorter[system + dropped]) + size(shorter[system + dropped + 1]);
        }
      }
    }
  }
}

/** Without the first tokens of a prompt that is too long; its very first one says that a document begins. */
const without = (ids, cut) => [ids[0], ...ids.slice(1 + cut)];

/** The messages that a node answers, as they were sent. */
function messagesBefore(conversation, node) {
  const messages = messagesOf(conversation, node.parent, node.system);
  const system = messages[0].role === "system" ? 1 : 0;
  return [...messages.slice(0, system), ...messages.slice(system + (node.skipped ?? 0))];
}

/** The tokens of the prompt that a node answers, as the server read them. */
export async function promptIds(model, conversation, node) {
  const { mode } = conversation;
  const what = mode === "text" ? { prompt: documentOf(conversation, node.parent) } : { messages: messagesBefore(conversation, node) };
  return without(await tokenize(model, what), node[CUT[mode]] ?? 0);
}

/**
 * The tokens of a prompt and of a reply's beginning: `parts`, whose last one, a text, has these tokens. The parts
 * before, which may hold calls, are encoded by the server: as an earlier turn, cut from an empty one that follows.
 */
export async function beginningIds(model, conversation, node, parts, tokens) {
  const before = await promptIds(model, conversation, node);
  const own = tokens.map((token) => token.id);
  if (conversation.mode === "text" || parts.length === 1) return [...before, ...own];
  const content = parts.slice(0, -1);
  const text = content.filter((part) => part.type === "text").map((part) => part.text).join("");
  const following = [{ role: "assistant", content: text, parts: content }, { role: "user", content: "" }];
  const all = await tokenize(model, { messages: [...messagesBefore(conversation, node), ...following] });
  const afterwards = 4; // the end of the reply, the empty message's start and end, the start of the next reply
  return [...before, ...all.slice(before.length + (node.cut ?? 0), -afterwards), ...own];
}

/** The text of tokens; bytes that are no characters are left out, as in the server's replies. */
export function textOfTokens(tokens) {
  const bytes = new Uint8Array(tokens.flatMap((token) => token.bytes));
  return new TextDecoder().decode(bytes).replace(/\ufffd/g, "");
}
