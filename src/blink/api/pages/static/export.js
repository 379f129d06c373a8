// SPDX-License-Identifier: Apache-2.0
// A conversation as a file: Markdown to read, JSON for programs.

import { toMessages } from "./conversation.js";
import { make } from "./dom.js";

const NAMES = { user: "Question", assistant: "Answer", tool: "Result" };

/** Fence a text; a fence inside of it is shorter. */
function fence(text, language) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const marks = "`".repeat(longest + 1);
  return `${marks}${language}\n${text}\n${marks}`;
}

function describe({ role, content, reasoning, calls = [] }) {
  const parts = [`## ${NAMES[role]}`];
  if (reasoning) parts.push(`<details><summary>Thoughts</summary>\n\n${reasoning.trim()}\n\n</details>`);
  if (content) parts.push(role === "tool" ? fence(content, "") : content.trim());
  for (const call of calls) parts.push(`Calls \`${call.name}\`:`, fence(call.arguments, "json"));
  return parts.join("\n\n");
}

/** Return the path that is shown as Markdown. */
export function toMarkdown(conversation) {
  return `${[`# ${conversation.title}`, ...conversation.path().map(describe)].join("\n\n")}\n`;
}

/** Return the path that is shown as JSON, its messages as the API takes them. */
export function toJson(conversation, model) {
  const { title, created } = conversation;
  const document = { title, created: new Date(created).toISOString(), model, messages: toMessages(conversation.path()) };
  return `${JSON.stringify(document, null, 2)}\n`;
}

/** Return the name of a conversation's file. */
export function fileName(title, ending) {
  return `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").toLowerCase() || "conversation"}.${ending}`;
}

/** Let the browser save a text as a file. */
export function download(name, text, type) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
