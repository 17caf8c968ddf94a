// The server: OpenAI's interface on the same host.

import { key } from "./store.js";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? `The server answered ${response.status}.`);
}

export async function models() {
  return (await (await ask("v1/models")).json()).data.map((model) => model.id);
}

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
];

/** The body of a request for the answer to some messages; answers of which nothing came are left out. */
export function bodyOf(messages, settings) {
  const said = messages.filter(({ role, content }) => role !== "assistant" || content);
  const history = said.map(({ role, content }) => ({ role, content }));
  const body = { messages: history, stream: true, stream_options: { include_usage: true } };
  if (settings.system.trim()) body.messages.unshift({ role: "system", content: settings.system });
  if (settings.model) body.model = settings.model;
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.max_tokens !== "") body.max_completion_tokens = Number(settings.max_tokens);
  if (settings.stop) body.stop = settings.stop;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

/** The pieces of an answer as they come: chat.completion.chunk objects. */
export async function* answer(body, signal) {
  const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The connection broke off before the answer was whole.");
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const piece = JSON.parse(data);
      if (piece.error) throw new ApiError(500, piece.error.message);
      yield piece;
    }
  }
}
