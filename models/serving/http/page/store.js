// What stays in the browser: conversations and settings in its local storage, the key until the tab is closed.

const CHAT = "jtile.chat.", SETTINGS = "jtile.settings", KEY = "jtile.key";

export const DEFAULTS = {
  model: "", theme: "", system: "", temperature: "0.7", max_tokens: "", top_p: "", top_k: "", min_p: "", seed: "",
  presence_penalty: "", frequency_penalty: "", repetition_penalty: "", stop: "", logprobs: false,
};

const memory = new Map(); // where a browser keeps nothing: in private windows of some

function get(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(name) ?? memory.get(name) ?? "null");
  } catch {
    return null;
  }
}

function put(storage, name, value) {
  const text = JSON.stringify(value);
  try {
    window[storage].setItem(name, text);
  } catch { // full, or not allowed
    memory.set(name, text);
  }
}

export const key = () => String(get("sessionStorage", KEY) ?? "");
export const keepKey = (value) => put("sessionStorage", KEY, value);

export function settings() {
  const found = get("localStorage", SETTINGS) ?? {};
  const known = Object.entries(DEFAULTS).map(([name, value]) => [name, typeof found[name] === typeof value ? found[name] : value]);
  return Object.fromEntries(known);
}

export const keepSettings = (value) => put("localStorage", SETTINGS, value);

/** All conversations, the newest first: {id, changed, messages: [{role, content, stats?, error?}]}. */
export function chats() {
  let names = [...memory.keys()];
  try {
    names.push(...Object.keys(localStorage));
  } catch { /* none are kept */ }
  const found = [...new Set(names)].filter((name) => name.startsWith(CHAT)).map((name) => get("localStorage", name));
  return found.filter((chat) => Array.isArray(chat?.messages)).sort((a, b) => b.changed - a.changed);
}

export const newChat = () => ({ id: crypto.getRandomValues(new Uint32Array(3)).join("-"), changed: Date.now(), messages: [] });

/** Keeps a conversation; probabilities of tokens are not kept. */
export function keep(chat) {
  chat.changed = Date.now();
  const messages = chat.messages.map(({ role, content, stats, error }) => ({ role, content, stats, error }));
  put("localStorage", CHAT + chat.id, { ...chat, messages });
}

export function forget(chat) {
  memory.delete(CHAT + chat.id);
  try {
    localStorage.removeItem(CHAT + chat.id);
  } catch { /* it was not kept */ }
}

export function title(chat) {
  const first = chat.messages.find((message) => message.role === "user")?.content.trim() ?? "";
  return first.split("\n")[0].slice(0, 60) || "New chat";
}
