// The page: conversations, the one that is shown, and the answer that is under way.

import { answer, bodyOf, models } from "./api.js";
import { element, part } from "./dom.js";
import { copy, View } from "./messages.js";
import { openSettings, setUp as setUpSettings } from "./settings.js";
import * as store from "./store.js";

let chat = store.newChat();
let running = null; // {control, chat}: the answer under way
const log = part("log"), text = part("text");

// -- what is shown ----------------------------------------------------------------------------------------------------

function showChats() {
  const items = store.chats().map((known) => {
    const open = element("button", { type: "button", class: "quiet open" }, store.title(known));
    if (known.id === chat.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => choose(known));
    const drop = element("button", { type: "button", class: "quiet drop", "aria-label": `Delete ${store.title(known)}` }, "×");
    drop.addEventListener("click", () => {
      if (running?.chat.id === known.id) running.control.abort();
      store.forget(known);
      known.id === chat.id ? choose(store.newChat()) : showChats();
    });
    return element("li", {}, open, drop);
  });
  part("chats").replaceChildren(...items);
}

function choose(next) {
  chat = running?.chat.id === next.id ? running.chat : next;
  document.body.classList.remove("side");
  showMessages();
  showChats();
  text.focus();
}

const acts = { retry: (message) => ask(chat.messages.indexOf(message)), edit };

function add(message) {
  const view = new View(message, acts);
  log.append(view.element);
  return view;
}

function showMessages() {
  log.replaceChildren();
  for (const message of chat.messages) {
    const view = add(message);
    if (running?.message === message) running.view = view;
  }
  if (!chat.messages.length) log.append(element("p", { class: "empty" }, "What do you want to know?"));
  log.scrollTop = log.scrollHeight;
}

function edit(message) {
  if (running) return;
  chat.messages.splice(chat.messages.indexOf(message));
  text.value = message.content;
  showMessages();
  grow();
  text.focus();
}

/** The field is as high as its text. */
function grow() {
  text.style.height = "auto";
  text.style.height = `${Math.min(text.scrollHeight + 2, innerHeight / 3)}px`;
}

function showRunning() {
  const here = running !== null;
  part("send").textContent = here ? "Stop" : "Send";
  part("send").classList.toggle("stop", here);
}

// -- answers ----------------------------------------------------------------------------------------------------------

function send() {
  if (running || !text.value.trim()) return;
  chat.messages.push({ role: "user", content: text.value });
  text.value = "";
  grow();
  ask(chat.messages.length);
}

/** The answer to the first `count` messages. */
async function ask(count) {
  if (running) return;
  const settings = store.settings();
  chat.messages.splice(count);
  const message = { role: "assistant", content: "", tokens: settings.logprobs ? [] : undefined };
  const body = bodyOf(chat.messages, settings);
  chat.messages.push(message);
  running = { control: new AbortController(), chat, message };
  showMessages();
  running.view.show(true);
  store.keep(chat);
  showChats();
  showRunning();
  part("status").textContent = "The answer begins";
  const { status } = await follow(message, body, running);
  const ended = running;
  running = null;
  showRunning();
  if (store.chats().some((known) => known.id === ended.chat.id)) store.keep(ended.chat);
  ended.view.show();
  part("status").textContent = message.error ?? "The answer has ended";
  if (status === 401) openSettings(message.error);
}

/** Takes the pieces of an answer; returns {status} of the error that ended it, if one did. */
async function follow(message, body, run) {
  const start = performance.now();
  const stats = (message.stats = { count: 0 });
  let first, drawn;
  const draw = () => (drawn ??= requestAnimationFrame(() => {
    const near = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    drawn = undefined;
    if (running !== run) return;
    run.view.show(true);
    if (near) log.scrollTop = log.scrollHeight;
  }));
  try {
    for await (const piece of answer(body, run.control.signal)) {
      const [choice] = piece.choices, now = performance.now();
      if (piece.usage) stats.count = piece.usage.completion_tokens;
      else if (choice?.delta.content) {
        message.content += choice.delta.content;
        stats.count++;
        first ??= now;
      }
      message.tokens?.push(...(choice?.logprobs?.content ?? []));
      stats.end = choice?.finish_reason ?? stats.end;
      if (first) Object.assign(stats, { first: (first - start) / 1000, rate: rate(stats.count, now - first) });
      draw();
    }
  } catch (error) {
    stats.end = "stopped";
    if (error.name !== "AbortError") {
      message.error = error.message;
      return { status: error.status };
    }
  }
  return {};
}

const rate = (count, milliseconds) => (count > 1 && milliseconds > 0 ? ((count - 1) * 1000) / milliseconds : 0);

// -- what can be done -------------------------------------------------------------------------------------------------

async function showModels() {
  try {
    const known = await models();
    const { model } = store.settings();
    part("model").replaceChildren(...known.map((name) => element("option", { value: name }, name)));
    part("model").value = known.includes(model) ? model : known[0];
  } catch (error) {
    part("status").textContent = error.message;
    if (error.status === 401) openSettings(error.message);
  }
}

const stop = () => running?.control.abort();

part("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  running ? stop() : send();
});
text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || part("settings").open) return;
  document.body.classList.remove("side");
  stop();
});
log.addEventListener("click", ({ target }) => {
  if (target.classList.contains("copy-code")) copy(target.closest(".code").querySelector("pre").textContent);
});
part("new").addEventListener("click", () => choose(store.newChat()));
part("side-open").addEventListener("click", () => {
  document.body.classList.add("side");
  part("new").focus();
});
part("side-close").addEventListener("click", () => {
  document.body.classList.remove("side");
  part("side-open").focus();
});
part("model").addEventListener("change", () => store.keepSettings({ ...store.settings(), model: part("model").value }));
addEventListener("storage", showChats);

setUpSettings(showModels);
showMessages();
showChats();
showModels();
