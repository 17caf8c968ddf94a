// Messages as elements: the text of an answer, its tokens with their probabilities, and what can be done with it.

import { button, element, part } from "./dom.js";
import { render } from "./markdown.js";

/** A message {role, content, tokens?, stats?, error?} on the page; `acts`: {retry, edit}, functions of the message. */
export class View {
  constructor(message, acts) {
    this.message = message;
    this.body = element("div", { class: "body" });
    this.thought = element("details", { class: "thought" }, element("summary", {}, "Thinking"), element("div"));
    this.foot = element("div", { class: "foot" });
    this.element = element("article", { class: `message ${message.role}` });
    const who = message.role === "user" ? "You" : "Answer";
    this.element.append(element("h2", { class: "unseen" }, who), this.thought, this.body, this.foot);
    this.byToken = Boolean(message.tokens);
    this.acts = acts;
    this.live = false;
    this.show();
  }

  /** Brings the page up to date with the message; `live`: it still grows. */
  show(live = false) {
    this.live = live;
    this.element.setAttribute("aria-busy", String(live));
    this.element.classList.toggle("live", live);
    const { content, tokens, role, error } = this.message;
    const { thought, text } = parted(content);
    this.thought.hidden = !thought;
    render(this.thought.lastChild, thought);
    if (live && thought) this.thought.open = !text;
    if (role === "user") this.body.textContent = content;
    else if (tokens?.length && this.byToken) showTokens(this.body, tokens);
    else {
      if (this.body.tokens) this.clear();
      render(this.body, text);
    }
    const note = error ? [element("p", { class: "error", role: "alert" }, error)] : [];
    this.foot.replaceChildren(...note, element("span", { class: "stats" }, spelled(this.message.stats)), ...this.buttons());
  }

  buttons() {
    if (this.live) return [];
    const { message } = this;
    const made = [button("Copy", "Copy the text", () => copy(message.content))];
    if (message.tokens?.length) {
      const flip = button(this.byToken ? "As text" : "By token", "Show the text, or its tokens", () => {
        this.byToken = !this.byToken;
        this.clear();
        this.show();
      });
      made.push(flip);
    }
    if (message.role === "user") made.push(button("Edit", "Change this message and ask again", () => this.acts.edit(message)));
    else made.push(button("Retry", "Ask for another answer", () => this.acts.retry(message)));
    return made;
  }

  clear() {
    this.body.replaceChildren();
    this.body.tokens = this.body.sources = undefined;
  }
}

/** What a model thinks before it answers, in the form of most of those that do, and the answer. */
function parted(content) {
  const found = /^\s*<think>([^]*?)(?:<\/think>|$)([^]*)$/.exec(content);
  return found ? { thought: found[1].trim(), text: found[2] } : { thought: "", text: content };
}

function spelled(stats) {
  if (!stats) return "";
  const parts = [`${stats.count} ${stats.count === 1 ? "token" : "tokens"}`];
  if (stats.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
  if (stats.first !== undefined) parts.push(`first after ${stats.first.toFixed(2)} s`);
  if (stats.end && stats.end !== "stop") parts.push({ length: "cut off: length", stopped: "stopped" }[stats.end] ?? stats.end);
  return parts.join(" · ");
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    part("status").textContent = "Copied";
  } catch {
    part("status").textContent = "The browser does not allow to copy";
  }
}

// -- tokens -----------------------------------------------------------------------------------------------------------

/** Tokens {token, logprob, top_logprobs} one by one; those that are there already stay. */
function showTokens(parent, tokens) {
  if (!parent.tokens) {
    parent.tokens = 0;
    parent.replaceChildren(element("p", { class: "tokens", role: "group", "aria-label": "Tokens; arrow keys go through them" }));
    parent.firstChild.addEventListener("keydown", walk);
  }
  for (const token of tokens.slice(parent.tokens)) {
    const shade = Math.min(Math.floor(-token.logprob / 0.7), 4); // halves of probability
    const span = element("span", { class: `token shade-${shade}`, tabindex: parent.tokens ? "-1" : "0" }, token.token);
    for (const event of ["mouseenter", "focus"]) span.addEventListener(event, () => tell(span, token));
    for (const event of ["mouseleave", "blur"]) span.addEventListener(event, () => (part("tip").hidden = true));
    parent.firstChild.append(span);
    parent.tokens++;
  }
}

function walk(event) {
  const { activeElement: here } = document;
  const next = { ArrowLeft: here.previousSibling, ArrowRight: here.nextSibling }[event.key];
  if (!next) return;
  event.preventDefault();
  here.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function tell(span, token) {
  const rows = (token.top_logprobs.some((top) => top.token === token.token) ? [] : [token]).concat(token.top_logprobs);
  const tip = part("tip");
  tip.replaceChildren(...rows.map((top) => {
    const chance = Math.exp(top.logprob);
    const bar = element("span", { class: "chance" });
    bar.style.width = `${100 * chance}%`;
    const name = element("code", {}, JSON.stringify(top.token).slice(1, -1) || " ");
    const row = element("div", { class: "row" }, name, element("span", { class: "track" }, bar), `${(100 * chance).toFixed(1)} %`);
    row.classList.toggle("chosen", top.token === token.token);
    return row;
  }));
  tip.hidden = false;
  const box = span.getBoundingClientRect(), width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - width - 4))}px`;
  tip.style.top = `${box.bottom + height + 8 < innerHeight ? box.bottom + 4 : box.top - height - 4}px`;
}
