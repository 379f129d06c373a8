// SPDX-License-Identifier: Apache-2.0
// A conversation: a tree of messages, as questions are edited and answers regenerated, and the path that is shown.

const TITLE_LENGTH = 60; // characters

/** Return a name that no other conversation has; randomUUID() is missing on pages without TLS. */
function makeId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  /** Begin one, or take up one that was kept. A node's `id` is its index in `nodes`. */
  constructor({ id = makeId(), title = "", created = Date.now(), updated = created, nodes = [], leaf = null } = {}) {
    Object.assign(this, { id, title, created, updated, nodes, leaf });
  }

  /** Return the nodes from the first question to the last one shown, or to `end`. */
  path(end = this.leaf) {
    const path = [];
    for (let id = end; id !== null; id = this.nodes[id].parent) path.unshift(this.nodes[id]);
    return path;
  }

  /** Add a message after the node `parent` (null: as the first), and show it. */
  add(parent, fields) {
    const node = { ...fields, id: this.nodes.length, parent };
    this.nodes.push(node);
    this.leaf = node.id;
    this.updated = Date.now();
    if (!this.title && node.role === "user") this.title = shorten(node.content);
    return node;
  }

  /** Return the versions of a message, itself among them. */
  versions({ parent, role }) {
    return this.nodes.filter((node) => node.parent === parent && node.role === role);
  }

  /** Show the version that stands `step` from this one, and what followed it last. */
  turn(node, step) {
    const versions = this.versions(node), other = versions[versions.indexOf(node) + step];
    if (!other) return;
    let last = other;
    for (let next = last; next; next = this.nodes.findLast(({ parent }) => parent === last.id)) last = next;
    this.leaf = last.id;
  }

  /** Return the calls of the last answer that have no result yet. */
  openCalls() {
    const path = this.path(), at = path.findLastIndex(({ role }) => role === "assistant");
    const results = new Set(path.slice(at + 1).map((node) => node.callId));
    return (path[at]?.calls ?? []).filter(({ id }) => !results.has(id));
  }
}

function shorten(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

/** Return a path as the API's messages; an answer of which nothing came is left out. */
export function toMessages(path) {
  return path.filter(({ role, content, calls }) => role !== "assistant" || content || calls.length).map(toMessage);
}

function toMessage({ role, content, reasoning, calls = [], callId }) {
  if (role === "tool") return { role, tool_call_id: callId, content };
  const message = { role, content };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls.length) message.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return message;
}
