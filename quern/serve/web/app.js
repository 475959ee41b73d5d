// The page: which conversation is open, which reply is being written, and what the buttons and keys do.

import * as api from "./api.js";
import { announce, byId, el, newId, toast } from "./dom.js";
import { MessageView } from "./message.js";
import { Reply, beginningIds, promptIds, textOfTokens } from "./reply.js";
import * as settingsOf from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { download, fileName, pack, unpack } from "./transfer.js";
import { addMissing, addNode, newConversation, path, removeNode, textOf, titleOf, walkTo } from "./tree.js";
import * as ui from "./ui.js";
import * as xray from "./xray.js";

const conversations = new Map();
const views = new Map(); // node id → MessageView, of the shown branch
const tokensKnown = new Map(); // node id → tokens, of this page's replies
const tabs = "BroadcastChannel" in window ? new BroadcastChannel("quern") : null;
let current = null; // the conversation on the page
let reply = null; // the reply that is being written
let branching = false; // the tokens that a reply will begin with are being asked for
let frame = 0;
let context = 0;
let keyTried = null; // the API key with which the server was asked last
let modeChosen = false; // by the user, not by the model
let welcome = { suggestions: {}, completes: [], sampling: {} };

/** Whether a reply can begin now; if not, it is said why. */
function free() {
  if (reply !== null) toast("A reply is being written: wait for its end, or stop it.");
  else if (branching) toast("A branch is about to begin: wait a moment.");
  return reply === null && !branching;
}

// What a message can ask for -----------------------------------------------------------------------------------

const page = {
  measure: ui.measure,
  live: (node) => (reply !== null && reply.node === node ? reply : null),
  tokens: async (node) => tokensKnown.get(node.id) ?? store.loadTokens(current.id, node.id),
  promptTokens: async (node) => {
    const served = [...byId("model").options].some((option) => option.value === node.model);
    const model = served ? node.model : byId("model").value;
    const ids = await promptIds(model, current, node);
    return api.scorePrompt(model, ids, Math.max(settingsOf.settings.alternatives, 5));
  },
  // A chat's prompt is made of several messages, which have their own editors; a text's can go on from any token.
  promptBranch: (node, tokens) =>
    current.mode === "chat" ? null : (index, token) => {
      if (!free()) return;
      const before = addNode(current, null, "user", [{ type: "text", text: textOfTokens([...tokens.slice(1, index), token]) }]);
      answer(current, addNode(current, before.id, "assistant", []));
    },
  walk: (node) => { walkTo(current, node); keep(current); draw(); ui.follow(false); views.get(node.id).bar.querySelector(".walk button:enabled")?.focus(); },
  regenerate: (node, { leaf } = current) => free() && answer(current, addNode(current, node.parent, "assistant", []), { leaf }),
  edited: (node, text) => {
    if (!free()) return;
    const edited = addNode(current, node.parent, "user", [{ type: "text", text }]);
    answer(current, addNode(current, edited.id, "assistant", []));
  },
  branch: (node, part, place, token) => begin(node, part, place, token),
  goOn: (node) => begin(node, node.parts.length - 1, null, null),
};

/** The tokens of a text of which the page has no record by this model; in the x-ray they have no probability. */
async function encoded(model, text, part) {
  const ids = await api.tokenize(model, { prompt: text, add_special_tokens: false });
  const scored = ids.length > 0 ? await api.scorePrompt(model, ids, 0) : [];
  return scored.map((token) => ({ ...token, logprob: null, part }));
}

/** A branch that begins with the tokens of a part of a reply before `place` (null: with all), then with another token. */
async function begin(node, part, place, token) {
  if (!free()) return;
  branching = true;
  const conversation = current;
  const model = byId("model").value;
  const ends = token?.text === "<|assistant_end|>";
  try {
    const all = (await page.tokens(node)) ?? [];
    const recorded = all.filter((one) => one.part === part);
    let earlier = all.filter((one) => one.part < part);
    let own = recorded.slice(0, place ?? recorded.length);
    if (token !== null && !ends) own.push({ ...token, part, top: recorded[place]?.top ?? [] });
    const text = place === null ? node.parts[part].text : textOfTokens(own);
    const known = ends || (node.model ?? model) === model; // another model has other tokens
    if (!known || textOfTokens(own) !== text) [earlier, own] = [[], await encoded(model, text, part)];
    const parts = [...node.parts.slice(0, part).map((one) => ({ ...one })), { type: "text", text }];
    const ids = ends ? null : await beginningIds(model, conversation, node, parts, own);
    const branched = addNode(conversation, node.parent, "assistant", parts);
    const { system = conversation.system, skipped = 0, cut = 0 } = node;
    Object.assign(branched, { model: node.model, system, skipped, cut });
    const given = [...earlier, ...own];
    if (ends) {
      branched.finish = "stop";
      await store.saveTokens(conversation.id, branched.id, given);
      keep(conversation);
      return draw();
    }
    await answer(conversation, branched, { ids }, given);
  } catch (error) {
    ui.problem(error.message);
  } finally {
    branching = false;
  }
}

// Replies ------------------------------------------------------------------------------------------------------

async function answer(conversation, node, plan = {}, tokens = []) {
  ui.problem(null);
  if (plan.ids === undefined) node.system = conversation.system; // later changes of it are for later replies
  const onupdate = () => { frame ||= requestAnimationFrame(drawLive); };
  reply = new Reply({ model: byId("model").value, context, conversation, node, plan, tokens: [...tokens], onupdate });
  const own = reply;
  ui.busy(true);
  draw();
  if (document.activeElement === document.body) views.get(node.id)?.box.focus({ preventScroll: true }); // its button is gone
  ui.follow(true);
  if (conversations.has(conversation.id)) keep(conversation); // the question outlives a closed tab
  announce("The model is replying.");
  const clock = setInterval(onupdate, 100);
  let trouble = null;
  try {
    if (own.model === "") await discover();
    own.model = own.node.model = byId("model").value;
    own.context = context;
    await own.run();
  } catch (error) {
    trouble = error;
  }
  clearInterval(clock);
  cancelAnimationFrame(frame);
  frame = 0;
  reply = null;
  ui.busy(false);
  await finish(conversation, own, trouble);
}

/** Keeps what was said. A reply that brought nothing leaves what was shown before, with a way to ask again. */
async function finish(conversation, { node, tokens, plan }, trouble) {
  const empty = node.parts.length === 0;
  if (empty && (trouble !== null || node.finish === "stopped")) removeNode(conversation, node, plan.leaf);
  else if (empty) node.parts.push({ type: "text", text: "" });
  if (conversations.has(conversation.id)) {
    conversation.updated = Date.now();
    if (tokens.length > 0 && conversation.nodes[node.id]) {
      tokensKnown.set(node.id, tokens);
      await store.saveTokens(conversation.id, node.id, tokens).catch(unkept);
    }
    await keep(conversation);
  }
  if (current !== conversation) return;
  const retry = () => page.regenerate(node);
  views.get(node.id)?.update(true);
  draw();
  if (trouble?.canShorten) {
    const counted = `takes ${trouble.promptTokens} tokens; the model's context holds ${trouble.context}`;
    const told = `The conversation ${trouble.context === null ? "is too long for one request" : counted}.`;
    ui.problem(told, () => { conversation.shortened = true; retry(); }, "Leave out the oldest messages");
  } else if (trouble !== null) ui.problem(explain(trouble), empty ? retry : null);
  else if (empty && !conversation.nodes[node.id]) ui.problem("Stopped before the reply began.", retry);
  else announce(`Reply: ${textOf(node).slice(0, 1500)}`);
}

function explain(error) {
  if (error.status === 401) {
    byId("settings").showModal();
    byId("set-key").focus();
    return "This server asks for an API key: enter it in the settings.";
  }
  if (error.code === "model_not_found") byId("model").replaceChildren(); // the next try asks which ones there are now
  return error instanceof TypeError ? "The server does not answer." : error.message;
}

function send(text) {
  if (!free()) return false;
  const textMode = current.mode === "text";
  if (text.trim() === "" && !(textMode && current.leaf !== null)) return false;
  conversations.set(current.id, current);
  const leaf = current.nodes[current.leaf] ?? null;
  let parent = current.leaf;
  if (text.trim() !== "") {
    // A question without an answer is replaced by the next one: user and assistant take turns.
    const above = leaf?.role === "user" && !textMode ? leaf.parent : parent;
    parent = addNode(current, above, "user", [{ type: "text", text: textMode ? text : text.trim() }]).id;
  }
  answer(current, addNode(current, parent, "assistant", []));
  return true;
}

function drawLive() {
  frame = 0;
  const view = reply === null ? undefined : views.get(reply.node.id);
  if (view === undefined) return;
  view.update(false);
  view.drawLive(reply);
  drawFill();
  ui.follow();
}

/** How much of the context the shown branch takes: what the server counted last, and the tokens that were said since. */
function drawFill() {
  const said = path(current).filter((node) => node.role === "assistant");
  const known = said.findLast((node) => node.stats?.prompt !== undefined);
  const counted = known === undefined ? 0 : known.stats.prompt + known.stats.tokens;
  ui.fill(counted + (reply !== null && reply.node !== known ? reply.stats().tokens : 0), context);
}

// Conversations ------------------------------------------------------------------------------------------------

const unkept = (error) => toast(`The browser could not keep the conversation: ${error.message}`);

async function keep(conversation) {
  sidebar.draw(conversations.values(), current.id);
  try {
    await store.save(conversation);
    tabs?.postMessage(conversation.id);
  } catch (error) {
    unkept(error);
  }
}

/** Takes over what another tab has saved: the title, the system text, and the messages that this tab lacks. */
async function takeOver({ data: id }) {
  const kept = (await store.all()).find((one) => one.id === id);
  const held = [current, reply?.conversation].find((one) => one?.id === id);
  if (held !== undefined && kept !== undefined) {
    addMissing(held, kept.nodes);
    Object.assign(held, { title: kept.title, named: kept.named, system: kept.system });
  } else if (held === undefined && kept === undefined) conversations.delete(id);
  else if (held === undefined) conversations.set(id, kept);
  if (held === current) draw();
  else sidebar.draw(conversations.values(), current.id);
}

function open(conversation) {
  current = conversation;
  views.clear();
  byId("messages").replaceChildren();
  ui.problem(null);
  xray.card.hide();
  draw();
  ui.follow(true);
  const leaf = conversation.nodes[conversation.leaf];
  if (leaf?.role === "user" && page.live(leaf) === null) ui.problem("This message has no reply yet.", () => page.regenerate({ parent: leaf.id }));
  if (sidebar.isNarrow()) sidebar.toggle(false);
  byId("input").focus();
}

/** Shows the branch of the leaf; messages that stay are not drawn again. */
function draw() {
  const shown = path(current);
  const ids = new Set(shown.map((node) => node.id));
  for (const [id, view] of views) {
    if (ids.has(id)) continue;
    view.box.remove();
    views.delete(id);
  }
  for (const node of shown) {
    const view = views.get(node.id);
    if (view !== undefined) {
      if (page.live(node) === null) view.update(true);
      continue;
    }
    const made = new MessageView(page, current, node);
    views.set(node.id, made);
    byId("messages").append(made.box);
  }
  ui.show(current, shown.length === 0, titleOf(current));
  drawFill();
  sidebar.draw(conversations.values(), current.id);
}

const modeOfModel = () => (welcome.completes.includes(byId("model").value) ? "text" : "chat");

function start() {
  modeChosen = false;
  open(newConversation(modeOfModel(), current?.system ?? ""));
}

async function remove(conversation) {
  if (reply?.conversation === conversation) reply.stop();
  const packed = await pack([conversation]);
  conversations.delete(conversation.id);
  await store.remove(conversation.id);
  tabs?.postMessage(conversation.id);
  if (current === conversation) start();
  else sidebar.draw(conversations.values(), current.id);
  toast("Deleted.", "Undo", () => bringIn(packed).catch(unkept));
}

async function bringIn(text) {
  const found = unpack(text);
  for (const { conversation, tokens } of found) {
    await store.save(conversation);
    conversations.set(conversation.id, conversation);
    for (const [node, list] of tokens) await store.saveTokens(conversation.id, node, list);
    tabs?.postMessage(conversation.id);
  }
  if (found.length > 0) open(found[0].conversation);
  return found.length;
}

const sidebar = new Sidebar({
  open,
  remove,
  rename: (conversation, title) => {
    Object.assign(conversation, { title, named: true });
    keep(conversation);
    if (conversation === current) draw();
  },
  export: async (chosen) => download(await pack(chosen), fileName(chosen)),
});

// The server ---------------------------------------------------------------------------------------------------

async function discover() {
  keyTried = settingsOf.settings.key;
  const [found, begun] = await Promise.all([api.models(), api.welcome()]);
  welcome = begun;
  settingsOf.begin(welcome.sampling);
  const select = byId("model");
  const last = history.state?.model; // what was chosen before the page was loaded again
  select.replaceChildren(...found.map(({ id, max_model_len }) => el("option", { value: id, text: id, selected: id === last, data: { context: max_model_len } })));
  select.hidden = found.length === 1; // one model needs no picker
  select.onchange = () => {
    context = Number(select.selectedOptions[0].dataset.context);
    history.replaceState({ model: select.value }, "");
    if (current.leaf === null && !modeChosen) current.mode = modeOfModel();
    draw();
    ui.suggest(welcome.suggestions[select.value] ?? [], (text) => { send(text); byId("input").focus(); });
  };
  select.onchange();
  ui.problem(null);
}

const meet = () => discover().catch((error) => ui.problem(explain(error)));

/** Asks again with a new key, where the server has not told its models. */
function meetWithKey() {
  if (byId("model").value === "" && settingsOf.settings.key !== keyTried) meet();
}

// Begin --------------------------------------------------------------------------------------------------------

async function main() {
  settingsOf.load();
  settingsOf.build();
  xray.prepare();
  current = newConversation("chat");
  ui.prepare({
    send,
    stop: () => reply?.stop(),
    start,
    busy: () => !free(),
    conversation: () => current,
    setMode: (mode) => { current.mode = mode; modeChosen = true; draw(); },
    setSystem: (text) => { current.system = text; if (conversations.has(current.id)) keep(current); },
    exportAll: async () => download(await pack([...conversations.values()]), fileName([])),
    importFile: async (file) => {
      try {
        const count = await bringIn(await file.text());
        toast(count === 1 ? "Imported a conversation." : `Imported ${count} conversations.`);
      } catch (error) {
        ui.problem(error.message);
        if (sidebar.isNarrow()) sidebar.toggle(false); // the list lies over it
        sidebar.draw(conversations.values(), current.id); // what there was room for
      }
    },
    measured: async (again) => {
      if (!again) return views.forEach((view) => view.repaint(ui.measure()));
      await Promise.all([...views.values()].map((view) => view.editor ?? view.refresh()));
      if (ui.measure() !== null) [...document.querySelectorAll(".text.tokens")].at(-1)?.focus(); // for the arrow keys
    },
    toggleList: () => sidebar.toggle(),
    editLast: () => [...views.values()].filter((view) => view.node.role === "user").at(-1)?.edit(),
  });
  if (!(await store.open())) toast("This browser keeps no data: conversations last as long as this page.");
  for (const conversation of await store.all()) {
    conversations.set(conversation.id, conversation);
    const leaf = conversation.nodes[conversation.leaf];
    if (leaf?.role === "assistant" && leaf.parts.length === 0) removeNode(conversation, leaf); // the tab was closed
  }
  draw();
  tabs?.addEventListener("message", takeOver);
  document.body.dataset.ready = newId();
  byId("settings").addEventListener("close", meetWithKey);
  window.addEventListener("hashchange", () => { byId("settings").close(); meetWithKey(); });
  await meet();
}

main();
