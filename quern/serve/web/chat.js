// The chat page: sends the conversation, shows the reply as it arrives. Every piece of text that came from a model,
// a server or a user reaches the page through textContent, never as markup.
"use strict";

const element = (id) => document.getElementById(id);
const conversation = []; // the messages as the API takes them
let model = null;
let running = null; // the AbortController of the reply being received

function show(role, text) {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  box.textContent = text;
  element("conversation").append(box);
  follow();
  return box;
}

function follow() {
  const view = element("conversation");
  view.scrollTop = view.scrollHeight;
}

// Pieces of one kind that follow each other are one part.
function append(parts, box, type, text) {
  const last = parts[parts.length - 1];
  if (last && last.type === type) {
    last.text += text;
  } else {
    parts.push({ type, text });
    const piece = document.createElement("span");
    if (type !== "text") piece.className = "tool";
    if (type !== "text") piece.title = type === "tool" ? "given to the calculator" : "the calculator's answer";
    box.append(piece);
  }
  const piece = parts[parts.length - 1];
  box.lastChild.textContent = piece.type === "output" ? `= ${piece.text}` : piece.text;
  follow();
}

function busy(controller) {
  running = controller;
  element("stop").hidden = controller === null;
  element("send").hidden = controller !== null;
}

// Yields the JSON of each server-sent event; throws when the stream ends without [DONE].
async function* events(response) {
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

async function request(signal, box) {
  if (model === null) await discover();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization() },
    signal,
    body: JSON.stringify({
      model,
      messages: conversation,
      stream: true,
      // An empty field is NaN here and null in JSON: the server's own value.
      temperature: element("temperature").valueAsNumber,
      max_completion_tokens: element("limit").valueAsNumber,
    }),
  });
  if (response.ok) return response;
  const error = (await response.json()).error;
  if (error.code !== "context_length_exceeded" || conversation.length === 1) throw new Error(error.message);
  conversation.splice(0, conversation.length - 1);
  element("conversation").insertBefore(note(`longer than the model's ${error.n_ctx} tokens`), box);
  return request(signal, box);
}

function note(reason) {
  const line = document.createElement("p");
  line.className = "note quiet";
  line.textContent = `The conversation is ${reason}: it begins anew with the last message.`;
  return line;
}

async function reply() {
  const controller = new AbortController();
  const box = show("assistant waiting", "");
  const parts = [];
  let trouble = null;
  busy(controller);
  try {
    for await (const event of events(await request(controller.signal, box))) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        if (choice.delta.content) append(parts, box, "text", choice.delta.content);
        for (const part of choice.delta.parts ?? []) append(parts, box, part.type, part.text);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") trouble = error.message;
  }
  box.classList.remove("waiting");
  if (box.isConnected) {
    finish(parts, box, trouble);
    busy(null);
    element("input").focus();
  }
}

// Keeps what was said. An exchange that brought nothing is taken back, so that user and assistant take turns.
function finish(parts, box, trouble) {
  if (trouble !== null) show("error", trouble);
  if (parts.length > 0) {
    const content = parts.filter((part) => part.type === "text").map((part) => part.text).join("");
    conversation.push({ role: "assistant", content, parts });
  } else {
    const last = conversation.pop();
    if (trouble !== null && element("input").value === "") write(last.content);
    box.remove();
  }
}

function authorization() {
  const key = element("key").value.trim();
  return key === "" ? {} : { Authorization: `Bearer ${key}` };
}

async function discover() {
  const response = await fetch("/v1/models", { headers: authorization() });
  if (response.status === 401) {
    element("key").closest("details").open = true;
    throw new Error("This server asks for an API key: enter it in the settings.");
  }
  model = (await response.json()).data[0].id;
  element("model").textContent = model;
}

function write(text) {
  element("input").value = text;
  fit();
}

// The field is as high as what is written in it.
function fit() {
  element("input").style.height = "auto";
  element("input").style.height = `${element("input").scrollHeight}px`;
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("input").value.trim();
  if (text === "" || running !== null) return;
  write("");
  element("welcome").hidden = true;
  conversation.push({ role: "user", content: text });
  show("user", text);
  reply();
});

element("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("form").requestSubmit();
  }
});

element("input").addEventListener("input", fit);

element("stop").addEventListener("click", () => running?.abort());

element("clear").addEventListener("click", () => {
  running?.abort();
  busy(null);
  conversation.length = 0;
  for (const box of document.querySelectorAll(".message, .note")) box.remove();
  element("welcome").hidden = false;
  element("input").focus();
});

discover().catch((error) => {
  show("error", error instanceof TypeError ? "The server does not answer." : error.message);
});
