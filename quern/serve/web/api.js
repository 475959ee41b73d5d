// Talks to the server that sent this page, and to no other.

import { settings } from "./settings.js";

/** An error that the server reported, in OpenAI's shape. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    this.promptTokens = error?.n_prompt_tokens ?? null;
    this.context = error?.n_ctx ?? null;
  }
}

function headers() {
  const key = settings.key.replace(/[^\x20-\xff]/g, "").trim(); // fetch takes no other characters, as a pasted U+200B
  return { "Content-Type": "application/json", ...(key === "" ? {} : { Authorization: `Bearer ${key}` }) };
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null); // a proxy's page is no JSON: the status says enough
  throw new ApiError(response.status, body?.error);
}

export async function get(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

export async function post(path, body, signal = undefined) {
  return checked(await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal }));
}

/** [{id, max_model_len}] */
export async function models() {
  return (await get("/v1/models")).data;
}

/** {suggestions, completes, sampling}: how the server would begin; suggestions: {model: texts}; completes: the models
 * that only continue texts. */
export const welcome = () => get("/welcome");

/** A model's token ids of a chat, {messages}, or of a text, {prompt}. */
export async function tokenize(model, what, signal) {
  return (await (await post("/tokenize", { model, ...what }, signal)).json()).tokens;
}

/** The tokens of a prompt with their probabilities; nothing is generated. The first token has none. */
export async function scorePrompt(model, ids, alternatives) {
  const body = { model, prompt: ids, echo: true, logprobs: alternatives, max_tokens: 0 };
  const answer = await (await post("/v1/completions", body)).json();
  return answer.choices[0].logprobs.content.map((token) => readToken(token, 0));
}

/** A token as the page keeps it. part: the number of the reply's part that it belongs to. */
export function readToken(given, part) {
  return { ...scored(given), part, top: given.top_logprobs.map(scored) };
}

const scored = (given) => ({ text: given.token, id: given.id, logprob: given.logprob, bytes: given.bytes ?? [] });

/** Yields the JSON of each server-sent event; throws when the stream ends without [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the reply did.");
    pending += value;
    const blocks = pending.split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
