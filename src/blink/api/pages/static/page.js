// SPDX-License-Identifier: Apache-2.0
// The frame of the page: which view is shown, the key, and whether the server can answer now.

import { Chat } from "./chat.js";
import { StateView } from "./state.js";

const HEALTH_INTERVAL = 2000; // milliseconds
const $ = (id) => document.getElementById(id);

const connection = {
  model: "",
  key: sessionStorage.getItem("blink-key") ?? "",
  headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  },
};

function notify(text, status) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
  if (status === 401) askForKey("The server does not accept this key.");
}

function askForKey(reason) {
  $("key-reason").textContent = reason;
  $("key").value = connection.key;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

function useKey(key) {
  connection.key = key;
  if (key) sessionStorage.setItem("blink-key", key);
  else sessionStorage.removeItem("blink-key");
  notify("");
  learnModel();
}

async function learnModel() {
  try {
    const response = await fetch("v1/models", { headers: connection.headers() });
    if (response.status === 401) askForKey(connection.key ? "The server does not accept this key." : "This server wants a key.");
    if (!response.ok) return;
    connection.model = (await response.json()).data[0].id;
    $("model").textContent = connection.model;
  } catch {
    // the look at the health says so
  }
}

async function lookAtHealth() {
  let state = "down", text = "no server";
  try {
    const response = await fetch("health", { cache: "no-store" });
    [state, text] = response.ok ? ["up", "ready"] : ["down", "engine away"];
  } catch {
    // no server
  }
  const before = $("health").dataset.state;
  $("health").dataset.state = state;
  $("health").textContent = text;
  if (state === "up" && before !== "up") {
    notify("");
    learnModel();
  }
}

const stateView = new StateView($("state"));

function show() {
  const name = location.hash === "#state" ? "state" : "chat";
  for (const view of ["chat", "state"]) {
    $(view).hidden = view !== name;
    if (view === name) $(`tab-${view}`).setAttribute("aria-current", "page");
    else $(`tab-${view}`).removeAttribute("aria-current");
  }
  stateView.isShown = name === "state";
  if (name === "chat") $("prompt").focus();
}

$("open-key").addEventListener("click", () => askForKey("The server's key is kept in this tab alone."));
$("key-form").addEventListener("submit", () => useKey($("key").value.trim()));
$("drop-key").addEventListener("click", () => {
  useKey("");
  $("key-dialog").close();
});
window.addEventListener("hashchange", show);
new Chat(connection, notify);
show();
lookAtHealth();
setInterval(() => document.hidden || lookAtHealth(), HEALTH_INTERVAL);
