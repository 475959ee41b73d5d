// Keeps conversations in the browser (IndexedDB), nowhere else. The probabilities of tokens are kept apart from their
// conversations, so that a list of conversations is read without them.

const NAME = "quern";
let opened = null;
const memory = { conversations: new Map(), tokens: new Map() }; // where the browser keeps nothing, as in some private windows

/** Opens the database. Resolves to false if the browser does not keep data: then it lasts as long as the page. */
export async function open() {
  try {
    opened = await new Promise((resolve, reject) => {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result.createObjectStore("tokens");
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
    return true;
  } catch {
    return false;
  }
}

/** Runs `work` on an object store in one transaction; resolves to its request's result once it is on disk. */
async function run(name, mode, work) {
  try {
    return await new Promise((resolve, reject) => {
      const transaction = opened.transaction(name, mode);
      const request = work(transaction.objectStore(name));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error); // also after any error
    });
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error; // Chromium's has no message
    throw new Error("The storage for this page is full: export conversations, then delete some.");
  }
}

const tokensKey = (conversation, node) => `${conversation}/${node}`;
const tokensOf = (conversation) => IDBKeyRange.bound(`${conversation}/`, `${conversation}/\uffff`);

export async function all() {
  if (opened === null) return [...memory.conversations.values()];
  return run("conversations", "readonly", (store) => store.getAll());
}

export async function save(conversation) {
  if (opened === null) return void memory.conversations.set(conversation.id, conversation);
  await run("conversations", "readwrite", (store) => store.put(conversation));
}

export async function remove(id) {
  if (opened === null) return void memory.conversations.delete(id);
  await run("conversations", "readwrite", (store) => store.delete(id));
  await run("tokens", "readwrite", (store) => store.delete(tokensOf(id)));
}

export async function saveTokens(conversation, node, tokens) {
  if (opened === null) return void memory.tokens.set(tokensKey(conversation, node), tokens);
  await run("tokens", "readwrite", (store) => store.put(tokens, tokensKey(conversation, node)));
}

/** The tokens of a reply, or undefined. */
export async function loadTokens(conversation, node) {
  if (opened === null) return memory.tokens.get(tokensKey(conversation, node));
  return run("tokens", "readonly", (store) => store.get(tokensKey(conversation, node)));
}
