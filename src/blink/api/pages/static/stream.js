// SPDX-License-Identifier: Apache-2.0
// One streamed chat completion: from the request to the parts of an answer.

/** An answer of the server that is an error; `status` 401 means the key. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Yield the data of server-sent events until the end. */
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

/** Yield the chunks of a chat completion; throws a ServerError for the server's, TypeError without a server. */
export async function* streamChat(body, headers, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  for await (const data of readEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? String(chunk.error), chunk.error.code);
    yield chunk;
  }
  throw new ServerError("The server ended the answer early.");
}
