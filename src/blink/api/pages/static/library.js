// SPDX-License-Identifier: Apache-2.0
// The conversations as this tab has them; every change is kept in the store.

const isSame = (own, kept) => own !== undefined && ["title", "leaf", "updated"].every((name) => own[name] === kept[name]);

export class Library {
  #all = new Map();

  /** `hooks` has changed(), isRunning(id), of which none is replaced by what is kept, and notify(text). */
  constructor(store, hooks) {
    Object.assign(this, { store, hooks });
    store.onForeignChange = () => this.load();
  }

  /** Take what is kept; what has not changed stays the object that it was. */
  async load() {
    const kept = (await this.store.list()).map((each) => (isSame(this.#all.get(each.id), each) ? this.#all.get(each.id) : each));
    const running = [...this.#all.values()].filter(({ id }) => this.hooks.isRunning(id));
    this.#all = new Map([...kept, ...running].map((conversation) => [conversation.id, conversation]));
    this.hooks.changed();
  }

  /** Return all, the last changed first. */
  list() {
    return [...this.#all.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.#all.get(id);
  }

  async save(conversation) {
    this.#all.set(conversation.id, conversation);
    this.hooks.changed();
    try {
      await this.store.save(conversation);
    } catch (error) {
      this.hooks.notify(`The browser does not keep this conversation: ${error.message}`);
    }
  }

  async remove(id) {
    this.#all.delete(id);
    this.hooks.changed();
    await this.store.remove(id);
  }
}
