// SPDX-License-Identifier: Apache-2.0
// The answers that are being streamed: one in each conversation, shown or not.

import { addChunk } from "./answer.js";
import { ServerError, streamChat } from "./stream.js";

const PAINT = 50, SAVE = 2000; // milliseconds between two looks of an answer that grows, and between two saves

export class Runs {
  #aborts = new Map(); // by the conversation's id
  #toPaint = new Set(); // nodes

  /** `hooks` has grown and ended (conversation, node), save(conversation) and notify(text, status). */
  constructor(hooks) {
    this.hooks = hooks;
  }

  includes(id) {
    return this.#aborts.has(id);
  }

  stop(id) {
    this.#aborts.get(id)?.abort();
  }

  /** Stream the answer to a request into a node. */
  async start(conversation, node, body, headers) {
    const abort = new AbortController();
    this.#aborts.set(conversation.id, abort);
    node.times.asked = performance.now();
    try {
      for await (const chunk of streamChat(body, headers, abort.signal)) {
        addChunk(node, chunk, performance.now());
        this.#paintSoon(conversation, node);
      }
    } catch (error) {
      this.#fail(node, error);
    }
    this.#aborts.delete(conversation.id);
    conversation.updated = Date.now();
    this.hooks.ended(conversation, node);
  }

  #paintSoon(conversation, node) {
    if (this.#toPaint.has(node)) return;
    this.#toPaint.add(node);
    setTimeout(() => {
      this.#toPaint.delete(node);
      if (!this.includes(conversation.id)) return;
      this.hooks.grown(conversation, node);
      if (Date.now() - conversation.updated < SAVE) return;
      conversation.updated = Date.now();
      this.hooks.save(conversation);
    }, PAINT);
  }

  #fail(node, error) {
    if (error.name === "AbortError") {
      node.note = "stopped";
      return;
    }
    [node.failed, node.note] = [true, "failed"];
    const text = error instanceof ServerError ? error.message : "No answer: the server cannot be reached.";
    this.hooks.notify(text, error.status);
    if (!(error instanceof ServerError || error instanceof TypeError)) throw error;
  }
}
