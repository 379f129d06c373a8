// SPDX-License-Identifier: Apache-2.0
// The list of conversations: open, rename, delete.

import { $, make, makeButton } from "./dom.js";

export class Sidebar {
  #deleted = null;

  /** `actions` has open(conversation), rename(conversation, title) and remove(conversation). */
  constructor(actions) {
    this.actions = actions;
    $("menu").addEventListener("click", () => this.#unfold($("menu").ariaExpanded !== "true"));
    $("shade").addEventListener("click", () => this.#unfold(false));
    $("delete-form").addEventListener("submit", () => this.actions.remove(this.#deleted));
    $("keep").addEventListener("click", () => $("delete-dialog").close());
    $("sidebar").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.target.matches("input")) return;
      this.#unfold(false);
      $("menu").focus();
    });
  }

  show(conversations, current) {
    if ($("conversations").querySelector("input")) return; // a title is being written
    const focused = document.activeElement?.closest("#conversations [data-id]")?.dataset.id;
    $("conversations").replaceChildren(...conversations.map((each) => this.#line(each, each.id === current)));
    if (focused) $("conversations").querySelector(`[data-id="${focused}"] button`)?.focus();
  }

  /** Fold the list away where it lies over the conversation. */
  fold() {
    this.#unfold(false);
  }

  #unfold(isOpen) {
    $("menu").ariaExpanded = String(isOpen);
    $("chat").classList.toggle("listing", isOpen);
    if (isOpen) $("new").focus();
  }

  #line(conversation, isCurrent) {
    const { id, title } = conversation, name = title || "Untitled";
    const open = makeButton(name, () => this.actions.open(conversation), { className: "title" });
    if (isCurrent) open.setAttribute("aria-current", "true");
    const rename = makeButton("✎", () => this.#rename(line, conversation), { label: `Rename ${name}` });
    const remove = makeButton("✕", () => this.#askToDelete(conversation), { label: `Delete ${name}` });
    const line = make("li", {}, open, rename, remove);
    line.dataset.id = id;
    return line;
  }

  #rename(line, conversation) {
    const input = make("input", { value: conversation.title, maxLength: 200, ariaLabel: "Title" });
    let isOpen = true;
    const end = (title) => {
      if (!isOpen) return;
      isOpen = false;
      input.remove();
      this.actions.rename(conversation, title.trim() || conversation.title);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(input.value);
      if (event.key === "Escape") end(conversation.title);
    });
    input.addEventListener("blur", () => end(input.value));
    line.replaceChildren(input);
    input.select();
  }

  #askToDelete(conversation) {
    this.#deleted = conversation;
    $("delete-what").textContent = `“${conversation.title || "Untitled"}” is kept nowhere else.`;
    $("delete-dialog").showModal();
  }
}
