// SPDX-License-Identifier: Apache-2.0
// The view of the chat: the conversation, the list of all, and what its fields and buttons do.

import { Chat } from "./chat.js";
import { $, makeButton } from "./dom.js";
import { download, fileName, toJson, toMarkdown } from "./export.js";
import { Library } from "./library.js";
import { keepParameters } from "./parameters.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";

const OPEN = "blink-open"; // which conversation this tab shows
const EXAMPLES = [
  "Explain in three sentences what a KV cache is.",
  "Write a Python function that merges two sorted lists.",
  "Solve $x^2 - 5x + 6 = 0$ step by step.",
  "Compare TCP and UDP in a table.",
];

/** Wire up the chat; returns it when the conversations are loaded. */
export async function startTalk(connection, notify) {
  const store = new Store();
  const chat = new Chat(connection, notify, () => showShown());
  const library = new Library(store, { changed: () => showShown(), isRunning: (id) => chat.isRunning(id), notify });
  const sidebar = new Sidebar({
    open: (conversation) => open(conversation),
    rename(conversation, title) {
      conversation.title = title;
      library.save(conversation);
    },
    remove(conversation) {
      chat.stop(conversation.id);
      if (conversation.id === chat.conversation.id) chat.open();
      library.remove(conversation.id);
    },
  });
  chat.library = library;

  function open(conversation) {
    sidebar.fold();
    notify("");
    chat.open(conversation);
  }

  function showShown() {
    const { id } = chat.conversation, kept = library.get(id);
    if (kept && kept !== chat.conversation) return chat.open(kept); // another tab has changed it
    sidebar.show(library.list(), id);
    sessionStorage.setItem(OPEN, id);
  }

  wire(chat, () => open());
  keepParameters();
  if (!(await store.open())) $("kept").textContent = "This browser keeps no conversations: they end with the page.";
  const last = sessionStorage.getItem(OPEN);
  await library.load();
  if (library.get(last)) chat.open(library.get(last));
  else chat.render();
  return chat;
}

function wire(chat, begin) {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    chat.send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    chat.send();
  });
  document.addEventListener("keydown", ({ key }) => {
    if (key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
  });
  $("stop-answer").addEventListener("click", () => chat.stop());
  $("new").addEventListener("click", begin);
  $("export-markdown").addEventListener("click", () => {
    download(fileName(chat.conversation.title, "md"), toMarkdown(chat.conversation), "text/markdown");
  });
  $("export-json").addEventListener("click", () => {
    download(fileName(chat.conversation.title, "json"), toJson(chat.conversation, chat.connection.model), "application/json");
  });
  const ask = (text) => {
    $("prompt").value = text;
    chat.send();
  };
  $("examples").append(...EXAMPLES.map((text) => makeButton(text, () => ask(text), { className: "example" })));
}
