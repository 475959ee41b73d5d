// A conversation as a tree of messages: to edit or to regenerate adds a branch, and the leaf says which one is shown.
//
// conversation: {id, title, named, mode: "chat" | "text", system, created, updated, nodes: {id: node}, leaf, shortened}
// shortened: the user agreed that the oldest messages are left out when the context is full.
// node: {id, parent, role: "user" | "assistant", parts: [{type: "text" | "tool" | "output", text}], time, pick, …}
// An assistant's node also has `model`, `finish` and `stats` of the reply, `system` of its prompt, and what that left out:
// `skipped`, the oldest messages of a chat, the first tokens of a text; `cut`, tokens of a chat. In a text, roles say who
// wrote.

import { newId } from "./dom.js";

const families = new WeakMap(); // conversation → its messages by parent, until one is added or removed

export function newConversation(mode, system = "") {
  const now = Date.now();
  return { id: newId(), title: "", named: false, mode, system, created: now, updated: now, nodes: {}, leaf: null };
}

/** Adds a message below `parent` (an id, or null for a first message) and shows it. */
export function addNode(conversation, parent, role, parts) {
  const node = { id: newId(), parent, role, parts, time: Date.now(), pick: null };
  conversation.nodes[node.id] = node;
  families.delete(conversation);
  show(conversation, node);
  return node;
}

/** Adds messages of another copy of the conversation. Those without text are not finished, in either copy. */
export function addMissing(conversation, nodes) {
  families.delete(conversation);
  for (const node of Object.values(nodes)) {
    const own = conversation.nodes[node.id] ?? { parts: [] };
    const begins = node.parent === null || conversation.nodes[node.parent] !== undefined;
    if (!begins || node.parts.length === 0 || own.parts.length > 0) continue;
    conversation.nodes[node.id] = Object.assign(own, node, { pick: own.pick ?? node.pick }); // a message may show it
  }
}

/** Removes a message. In its place, the branch of the leaf `before` is shown, or else the last version. */
export function removeNode(conversation, node, before) {
  delete conversation.nodes[node.id];
  families.delete(conversation);
  const others = siblings(conversation, node);
  if (others.length > 0) return show(conversation, deepest(conversation, conversation.nodes[before] ?? others.at(-1)));
  conversation.leaf = node.parent;
  if (node.parent !== null) conversation.nodes[node.parent].pick = null;
}

/** The messages from the first one to the shown leaf, or to `end`. */
export function path(conversation, end = conversation.leaf) {
  const found = [];
  for (let id = end; id !== null; id = conversation.nodes[id].parent) found.push(conversation.nodes[id]);
  return found.reverse();
}

/** The messages in the place of this one, in the order in which they were made. */
export function siblings(conversation, node) {
  if (!families.has(conversation)) families.set(conversation, Map.groupBy(Object.values(conversation.nodes), (one) => one.parent));
  const found = families.get(conversation).get(node.parent) ?? [];
  return found.sort((one, other) => one.time - other.time); // those of another tab are added later
}

/** Shows the branch of a message as it was when it was last seen. */
export function walkTo(conversation, node) {
  show(conversation, deepest(conversation, node));
}

function deepest(conversation, node) {
  while (node.pick !== null && node.pick !== undefined) node = conversation.nodes[node.pick];
  return node;
}

function show(conversation, leaf) {
  conversation.leaf = leaf.id;
  for (let node = leaf; node.parent !== null; node = conversation.nodes[node.parent]) {
    conversation.nodes[node.parent].pick = node.id;
  }
}

export function textOf(node) {
  return node.parts.filter((part) => part.type === "text").map((part) => part.text).join("");
}

/** The conversation as the API takes it, up to the node `end`, after a system text. */
export function messagesOf(conversation, end, text = conversation.system) {
  const messages = path(conversation, end).map((node) =>
    node.role === "user"
      ? { role: "user", content: textOf(node) }
      : { role: "assistant", content: textOf(node), parts: node.parts },
  );
  const system = text.trim();
  return system === "" ? messages : [{ role: "system", content: system }, ...messages];
}

/** The text of a completion, up to the node `end`. */
export function documentOf(conversation, end) {
  return path(conversation, end).map(textOf).join("");
}

export function titleOf(conversation) {
  if (conversation.title !== "") return conversation.title;
  const first = path(conversation).find((node) => node.role === "user");
  const text = first === undefined ? "" : textOf(first).trim().replace(/\s+/g, " ");
  return text === "" ? "New conversation" : text.length > 60 ? `${cut(text, 57)}…` : text;
}

/** The beginning of a text, without half a character at its end. */
export const cut = (text, length) => text.slice(0, length).replace(/\p{Surrogate}$/u, "");

/** Whether all words of a search are in the title or in a message. */
export function matches(conversation, query) {
  const words = query.toLowerCase().split(/\s+/).filter((word) => word !== "");
  if (words.length === 0) return true;
  const all = [titleOf(conversation), ...Object.values(conversation.nodes).map(textOf)].join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}
