// SPDX-License-Identifier: Apache-2.0
// The frame of the page: which view is shown, the key, and whether the server can answer now.

import { Connection } from "./connection.js";
import { $ } from "./dom.js";
import { StateView } from "./state.js";
import { startTalk } from "./talk.js";

const HEALTH_INTERVAL = 2000; // milliseconds
const WAITING = {
  starting: "The model is being loaded. Write your question now, and send it when the server is ready.",
  down: "The server runs, but its engine does not answer.",
  gone: "The server does not answer.",
};

const connection = new Connection();
const stateView = new StateView($("state"));

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
  notify("");
  learnModel();
}

async function learnModel() {
  const status = await connection.learnModel();
  if (status === 401) askForKey(connection.key ? "The server does not accept this key." : "This server wants a key.");
  $("model").textContent = $("model").title = connection.model;
}

async function lookAtHealth() {
  const before = connection.state;
  await connection.lookAtHealth();
  const { state, reason } = connection;
  $("health").dataset.state = state;
  $("health").textContent = connection.describe();
  $("health").title = reason;
  $("waiting").textContent = WAITING[state] ?? "";
  if (state === "up" && before !== "up") {
    notify("");
    learnModel();
  }
}

function show() {
  const name = location.hash === "#state" ? "state" : "chat";
  for (const view of ["chat", "state"]) {
    $(view).hidden = view !== name;
    if (view === name) $(`tab-${view}`).setAttribute("aria-current", "page");
    else $(`tab-${view}`).removeAttribute("aria-current");
  }
  $("menu").hidden = name !== "chat";
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
startTalk(connection, notify);
show();
lookAtHealth();
setInterval(() => document.hidden || lookAtHealth(), HEALTH_INTERVAL);
