// SPDX-License-Identifier: Apache-2.0
// The conversations as this tab has them; every change is kept in the store.

export class Library {
  #all = new Map();

  /** `onChange` is called after each change; one that `isRunning(id)` says is not replaced by what is kept. */
  constructor(store, isRunning, onChange) {
    Object.assign(this, { store, isRunning, onChange });
    store.onForeignChange = () => this.load();
  }

  /** Take what is kept. */
  async load() {
    const kept = await this.store.list();
    const running = [...this.#all.values()].filter(({ id }) => this.isRunning(id));
    this.#all = new Map([...kept, ...running].map((conversation) => [conversation.id, conversation]));
    this.onChange();
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
    this.onChange();
    await this.store.save(conversation);
  }

  async remove(id) {
    this.#all.delete(id);
    this.onChange();
    await this.store.remove(id);
  }
}
