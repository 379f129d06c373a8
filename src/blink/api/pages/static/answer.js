// SPDX-License-Identifier: Apache-2.0
// An answer that grows: chunks are added to its text, its reasoning, its calls and its times.

/** Return the fields of an answer of which nothing has come. */
export const emptyAnswer = () => ({ role: "assistant", content: "", reasoning: "", calls: [], note: "", times: {} });

/** Add a chunk of a stream to an answer; `now` is in milliseconds, on the clock of `answer.times.asked`. */
export function addChunk(answer, chunk, now) {
  const { times } = answer, choice = chunk.choices?.[0], delta = choice?.delta ?? {};
  times.tokens = chunk.usage?.completion_tokens ?? times.tokens;
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "", content = delta.content ?? "";
  for (const part of delta.tool_calls ?? []) addCall(answer.calls, part);
  answer.reasoning += reasoning;
  answer.content += content;
  if (choice?.finish_reason === "length") answer.note = "cut at the limit of tokens";
  if (!reasoning && !content && !delta.tool_calls?.length) return;
  times.first ??= now;
  times.last = now;
  if (reasoning) times.thought = now;
}

function addCall(calls, { index, id, function: part }) {
  const call = (calls[index] ??= { id: "", name: "", arguments: "" });
  if (id) call.id = id;
  call.name += part?.name ?? "";
  call.arguments += part?.arguments ?? "";
}

const SHORT = 20; // milliseconds, in which no rate can be told
const seconds = (from, to, digits) => ((to - from) / 1000).toFixed(digits);

/** Return an answer's figures in words. */
export function describeTimes({ times, note }) {
  const { asked, first, last, tokens } = times, parts = [];
  if (first) parts.push(`first token after ${seconds(asked, first, 2)} s`);
  if (tokens > 1 && last - first > SHORT) parts.push(`${tokens} tokens, ${((1000 * (tokens - 1)) / (last - first)).toFixed(1)} per second`);
  if (note) parts.push(note);
  return parts.join(" · ");
}

/** Return what stands above an answer's reasoning. */
export function describeThinking({ content, calls, times }, isRunning) {
  if (isRunning && !content && !calls.length) return "Thinking…";
  return times.thought ? `Thought for ${seconds(times.asked, times.thought, 1)} s` : "Thoughts";
}
