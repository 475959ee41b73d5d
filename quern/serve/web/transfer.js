// Conversations as a file, and back. A file may come from anyone: every field is checked and copied by name, and only
// what was checked is kept.

import { newId } from "./dom.js";
import { loadTokens } from "./store.js";
import { cut, titleOf } from "./tree.js";

const FORMAT = "quern-conversations";
const MOST_CONVERSATIONS = 10000;
const MOST_NODES = 20000;

/** Conversations, with their tokens, as the text of a file. */
export async function pack(conversations) {
  const packed = [];
  for (const conversation of conversations) {
    const tokens = {};
    for (const id of Object.keys(conversation.nodes)) {
      const found = await loadTokens(conversation.id, id);
      if (found !== undefined) tokens[id] = found;
    }
    packed.push({ ...conversation, tokens });
  }
  return JSON.stringify({ format: FORMAT, version: 1, conversations: packed });
}

export function download(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export function fileName(conversations) {
  if (conversations.length !== 1) return "quern-conversations.json";
  const words = titleOf(conversations[0]).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `quern-${cut(words, 40) || "conversation"}.json`;
}

/** The conversations of a file: [{conversation, tokens}]. Each gets a new id. Throws an Error that says what is wrong. */
export function unpack(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON: choose one that this page exported.");
  }
  need(isObject(data) && data.format === FORMAT, "The file has no conversations of this page.");
  need(data.version === 1, "The file is of a later version of this page.");
  need(Array.isArray(data.conversations) && data.conversations.length <= MOST_CONVERSATIONS, "The list of conversations is damaged.");
  return data.conversations.map(unpackOne);
}

function unpackOne(given, index) {
  const where = `Conversation ${index + 1}`;
  need(isObject(given) && isObject(given.nodes), `${where} is damaged.`);
  const entries = Object.entries(given.nodes);
  need(entries.length <= MOST_NODES, `${where} has more than ${MOST_NODES} messages.`);
  // Maps, because a stranger's parent, pick or leaf may be "__proto__", which every object has.
  const nodes = new Map(entries.map(([id, node]) => [id, unpackNode(id, node, where)]));
  for (const node of nodes.values()) {
    need(node.parent === null || nodes.has(node.parent), `${where}: a message answers one that is missing.`);
    if (!nodes.has(node.pick) || nodes.get(node.pick).parent !== node.id) node.pick = null;
  }
  needNoLoops(nodes, where);
  const leaf = nodes.has(given.leaf) ? given.leaf : [...nodes.keys()].pop() ?? null;
  const conversation = {
    id: newId(),
    title: line(given.title),
    named: given.named === true,
    mode: given.mode === "text" ? "text" : "chat",
    system: typeof given.system === "string" ? given.system : "",
    created: time(given.created),
    updated: time(given.updated),
    nodes: Object.fromEntries(nodes),
    leaf,
  };
  const tokens = new Map();
  for (const [id, list] of Object.entries(isObject(given.tokens) ? given.tokens : {})) {
    if (nodes.has(id) && Array.isArray(list)) tokens.set(id, list.map((token) => unpackToken(token, where)));
  }
  return { conversation, tokens };
}

function unpackNode(id, given, where) {
  need(/^[0-9a-f]{1,40}$/.test(id) && isObject(given), `${where}: a message is damaged.`);
  need(given.role === "user" || given.role === "assistant", `${where}: a message is from neither user nor assistant.`);
  need(Array.isArray(given.parts), `${where}: a message has no text.`);
  const parts = given.parts.map((part) => {
    const known = isObject(part) && ["text", "tool", "output"].includes(part.type) && typeof part.text === "string";
    need(known, `${where}: a part of a message is damaged.`);
    return { type: part.type, text: part.text };
  });
  const node = {
    id,
    parent: given.parent === null ? null : String(given.parent),
    role: given.role,
    parts,
    time: time(given.time),
    pick: typeof given.pick === "string" ? given.pick : null,
  };
  if (given.role === "assistant") {
    node.finish = typeof given.finish === "string" ? given.finish : null;
    node.skipped = Number.isInteger(given.skipped) && given.skipped > 0 ? given.skipped : 0;
    if (Number.isInteger(given.cut) && given.cut > 0) node.cut = given.cut;
    if (typeof given.system === "string") node.system = given.system;
    if (typeof given.model === "string") node.model = given.model;
    const stats = Object.entries(isObject(given.stats) ? given.stats : {});
    node.stats = Object.fromEntries(stats.filter(([name, value]) => /^[a-z]+$/.test(name) && Number.isFinite(value)));
  }
  return node;
}

function unpackToken(given, where) {
  need(isObject(given) && Array.isArray(given.top), `${where}: the probabilities of a reply are damaged.`);
  return { ...scored(given, where), part: Number.isInteger(given.part) ? given.part : 0, top: given.top.map((one) => scored(one, where)) };
}

function scored(given, where) {
  const bytes = isObject(given) && Array.isArray(given.bytes) && given.bytes.every((byte) => Number.isInteger(byte) && byte >= 0 && byte < 256);
  const known = bytes && typeof given.text === "string" && Number.isInteger(given.id);
  need(known && (given.logprob === null || Number.isFinite(given.logprob)), `${where}: the probabilities of a reply are damaged.`);
  return { text: given.text, id: given.id, logprob: given.logprob, bytes: given.bytes };
}

/** Following parents from anywhere must end at a first message. */
function needNoLoops(nodes, where) {
  const fine = new Set();
  for (let node of nodes.values()) {
    const seen = new Set();
    while (node.parent !== null && !fine.has(node.id)) {
      need(!seen.has(node.id), `${where}: a message answers itself.`);
      seen.add(node.id);
      node = nodes.get(node.parent);
    }
    for (const id of seen) fine.add(id);
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const time = (value) => (Number.isFinite(value) && value > 0 ? value : Date.now());
const line = (value) => (typeof value === "string" ? cut(value.replace(/\s+/g, " "), 200) : "");

function need(condition, message) {
  if (!condition) throw new Error(message);
}
