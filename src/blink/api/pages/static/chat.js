// SPDX-License-Identifier: Apache-2.0
// The chat: one conversation, streamed. What a model says is only ever shown as text.

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "repetition_penalty", "seed"];
const $ = (id) => document.getElementById(id);

/** An answer of the server that is an error; `status` 401 means the key. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Read the data of server-sent events until the end. */
async function* readEvents(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

async function errorOf(response) {
  let message = `The server answers ${response.status}.`;
  try {
    const body = await response.json();
    message = body.error?.message ?? (typeof body.error === "string" ? body.error : message);
  } catch {
    // no JSON: the status has to do
  }
  return new ServerError(message, response.status);
}

export class Chat {
  #messages = [];
  #abort = null;

  /** `connection` has `headers()` and `model`; `onError` gets what went wrong. */
  constructor(connection, onError) {
    this.connection = connection;
    this.onError = onError;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    $("stop-answer").addEventListener("click", () => this.stop());
    $("regenerate").addEventListener("click", () => this.regenerate());
    $("clear").addEventListener("click", () => this.clear());
    this.#update();
  }

  send() {
    const text = $("prompt").value.trim();
    if (!text || this.#abort) return;
    $("prompt").value = "";
    this.#add("user", text);
    this.#answer();
  }

  stop() {
    this.#abort?.abort();
  }

  /** Answer the last question anew. */
  regenerate() {
    if (this.#abort) return;
    if (this.#messages.at(-1)?.role === "assistant") this.#messages.pop().item.remove();
    if (this.#messages.at(-1)?.role === "user") this.#answer();
  }

  clear() {
    this.stop();
    for (const { item } of this.#messages.splice(0)) item.remove();
    this.#update();
    $("prompt").focus();
  }

  #add(role, content) {
    const item = document.createElement("li");
    item.className = role;
    const body = item.appendChild(document.createElement("span"));
    body.textContent = content;
    $("messages").append(item);
    item.scrollIntoView({ block: "end" });
    const message = { role, content, item, body };
    this.#messages.push(message);
    return message;
  }

  #body() {
    const system = $("system").value.trim();
    const said = this.#messages.filter(({ content }) => content); // a failed answer has none
    const messages = said.map(({ role, content }) => ({ role, content }));
    if (system) messages.unshift({ role: "system", content: system });
    const body = { model: this.connection.model, messages, stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
    if ($("stop").value) body.stop = [$("stop").value];
    if ($("service_tier").value) body.service_tier = $("service_tier").value;
    return JSON.stringify(body);
  }

  async #answer() {
    const body = this.#body(); // before the empty answer joins the conversation
    const message = this.#add("assistant", "");
    const asked = performance.now();
    const times = { first: 0, last: 0, tokens: 0 };
    const abort = (this.#abort = new AbortController());
    message.item.classList.add("streaming");
    this.#update();
    let note = "";
    try {
      await this.#stream(body, message, times, abort.signal);
    } catch (error) {
      if (error.name === "AbortError") note = "stopped";
      else note = this.#fail(message, error);
    }
    message.item.classList.remove("streaming");
    this.#annotate(message, times, asked, note);
    if (this.#abort === abort) this.#abort = null;
    this.#update();
  }

  async #stream(body, message, times, signal) {
    const headers = { "Content-Type": "application/json", ...this.connection.headers() };
    const response = await fetch("v1/chat/completions", { method: "POST", headers, body, signal });
    if (!response.ok) throw await errorOf(response);
    for await (const data of readEvents(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message ?? String(chunk.error), chunk.error.code);
      times.tokens = chunk.usage?.completion_tokens ?? times.tokens;
      const text = chunk.choices?.[0]?.delta?.content;
      if (!text) continue;
      times.first ||= performance.now();
      times.last = performance.now();
      this.#extend(message, text);
    }
    throw new ServerError("The server ended the answer early.");
  }

  #extend(message, text) {
    const log = $("messages");
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    message.content += text;
    message.body.textContent = message.content;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  #fail(message, error) {
    message.item.classList.add("failed");
    const text = error instanceof ServerError ? error.message : "No answer: the server cannot be reached.";
    this.onError(text, error.status);
    return "failed";
  }

  #annotate(message, { first, last, tokens }, asked, note) {
    const parts = [];
    if (first) parts.push(`first token after ${((first - asked) / 1000).toFixed(2)} s`);
    if (tokens > 1 && last > first) parts.push(`${tokens} tokens, ${((1000 * (tokens - 1)) / (last - first)).toFixed(1)} per second`);
    if (note) parts.push(note);
    message.item.append(Object.assign(document.createElement("small"), { textContent: parts.join(" · ") }));
  }

  #update() {
    const isBusy = this.#abort !== null;
    $("send").disabled = isBusy;
    $("stop-answer").hidden = !isBusy;
    $("regenerate").hidden = isBusy || this.#messages.length === 0;
    $("clear").hidden = this.#messages.length === 0;
  }
}
