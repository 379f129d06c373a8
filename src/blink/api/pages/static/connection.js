// SPDX-License-Identifier: Apache-2.0
// The server as the page knows it: its key, its model, and whether it can answer now.

const KEPT = "blink-key";
const TEXTS = { up: "ready", starting: "starting", down: "engine away", gone: "no server" };

export class Connection {
  model = "";
  state = "unknown";
  reason = ""; // the server's, when it cannot answer
  #key = sessionStorage.getItem(KEPT) ?? "";

  get key() {
    return this.#key;
  }

  /** Keep the key for this tab. */
  set key(key) {
    this.#key = key;
    if (key) sessionStorage.setItem(KEPT, key);
    else sessionStorage.removeItem(KEPT);
  }

  headers() {
    return this.#key ? { Authorization: `Bearer ${this.#key}` } : {};
  }

  /** Return the state in a word or two. */
  describe() {
    return TEXTS[this.state] ?? "looking";
  }

  /** Ask for the model's name; returns the status of the answer, 0 for none. */
  async learnModel() {
    try {
      const response = await fetch("v1/models", { headers: this.headers() });
      if (response.ok) this.model = (await response.json()).data[0].id;
      return response.status;
    } catch {
      return 0; // the look at the health says so
    }
  }

  /** Look whether requests are served now: up, starting (the model is being loaded), down or gone. */
  async lookAtHealth() {
    try {
      const response = await fetch("health", { cache: "no-store" });
      this.reason = response.ok ? "" : ((await response.json()).error?.message ?? "");
      this.state = response.ok ? "up" : this.reason.includes("starting") ? "starting" : "down";
    } catch {
      [this.state, this.reason] = ["gone", ""];
    }
  }
}
