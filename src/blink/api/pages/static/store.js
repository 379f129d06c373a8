// SPDX-License-Identifier: Apache-2.0
// Where conversations are kept: the browser's IndexedDB, one record each; the tabs of a browser tell each other.

import { Conversation } from "./conversation.js";

const NAME = "blink", TABLE = "conversations";

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

export class Store {
  #database = null;
  #channel = new BroadcastChannel(NAME);

  /** Open the database; without one, as some private windows have none, nothing outlives the page. */
  async open() {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
      this.#database = await done(request);
    } catch {
      this.#database = null;
    }
    return this.#database !== null;
  }

  /** Call `look` after each change in another tab. */
  set onForeignChange(look) {
    this.#channel.onmessage = look;
  }

  /** Return all conversations, the newest first. */
  async list() {
    const records = this.#database ? await done(this.#table("readonly").getAll()) : [];
    return records.sort((a, b) => b.updated - a.updated).map((record) => new Conversation(record));
  }

  async save(conversation) {
    if (!this.#database) return;
    await done(this.#table("readwrite").put({ ...conversation }));
    this.#channel.postMessage(conversation.id);
  }

  async remove(id) {
    if (!this.#database) return;
    await done(this.#table("readwrite").delete(id));
    this.#channel.postMessage(id);
  }

  #table(mode) {
    return this.#database.transaction(TABLE, mode).objectStore(TABLE);
  }
}
