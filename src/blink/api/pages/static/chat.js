// SPDX-License-Identifier: Apache-2.0
// The conversation that is shown: questions, answers, other versions of both, results of calls.

import { emptyAnswer } from "./answer.js";
import { Conversation, toMessages } from "./conversation.js";
import { $ } from "./dom.js";
import { makeView } from "./message.js";
import { readParameters, systemMessage } from "./parameters.js";
import { Runs } from "./runs.js";

const NEAR = 80; // pixels from the end within which the end stays in view

export class Chat {
  #conversation = new Conversation();
  #views = new Map(); // by node, of those that are shown
  #runs;

  /** `notify(text, status)` gets what went wrong; `onShown` is called after another conversation is shown. */
  constructor(connection, notify, onShown) {
    Object.assign(this, { connection, notify, onShown, library: null });
    this.#runs = new Runs({
      notify,
      grown: (conversation, node) => this.#paint(conversation, node),
      ended: (conversation, node) => this.#end(conversation, node),
      save: (conversation) => this.#saveUnlessDeleted(conversation),
    });
    this.actions = {
      edit: (node, text) => this.#ask(node.parent, text),
      regenerate: (node) => this.#answer(node.parent),
      turn: (node, step) => this.#turn(node, step),
      giveResult: (call, text) => this.#giveResult(call, text),
    };
  }

  get conversation() {
    return this.#conversation;
  }

  isRunning(id) {
    return this.#runs.includes(id);
  }

  /** Show a conversation; without one, a new one. */
  open(conversation = new Conversation()) {
    this.#conversation = conversation;
    this.render();
    this.onShown();
    $("messages").scrollTop = $("messages").scrollHeight;
    $("prompt").focus();
  }

  /** Send what stands in the composer. */
  send() {
    const text = $("prompt").value.trim();
    if (!text || this.isRunning(this.#conversation.id)) return;
    if (this.#ask(this.#conversation.leaf, text)) $("prompt").value = "";
  }

  stop(id = this.#conversation.id) {
    this.#runs.stop(id);
  }

  render() {
    const conversation = this.#conversation, openCalls = conversation.openCalls();
    const isRunning = this.isRunning(conversation.id);
    this.#views = new Map(conversation.path().map((node) => [node, makeView(node, this.actions, conversation.versions(node))]));
    for (const [node, view] of this.#views) view.update({ isRunning: isRunning && node.id === conversation.leaf, openCalls });
    $("messages").replaceChildren(...[...this.#views.values()].map(({ root }) => root));
    this.#showButtons();
  }

  /** Ask a question after the node `parent`; returns whether it was sent. */
  #ask(parent, text) {
    return this.#answer(parent, { role: "user", content: text });
  }

  /** Answer the path that ends with `parent`, or with a question to be added to it. */
  #answer(parent, question = null) {
    const conversation = this.#conversation;
    if (this.isRunning(conversation.id)) return false;
    let body;
    try {
      body = this.#body([...conversation.path(parent), ...(question ? [question] : [])]);
    } catch (error) {
      this.notify(error.message);
      return false;
    }
    this.notify("");
    const last = question ? conversation.add(parent, question).id : parent;
    const node = conversation.add(last, { ...emptyAnswer(), model: this.connection.model });
    this.#runs.start(conversation, node, body, this.connection.headers());
    this.render();
    $("messages").scrollTop = $("messages").scrollHeight;
    this.library.save(conversation);
    return true;
  }

  #body(path) {
    if (this.connection.state === "starting") throw new Error("The model is still being loaded. Send again when the server is ready.");
    const messages = toMessages(path), system = systemMessage();
    if (system) messages.unshift({ role: "system", content: system });
    return { model: this.connection.model, messages, stream: true, stream_options: { include_usage: true }, ...readParameters() };
  }

  #paint(conversation, node) {
    const isRunning = this.isRunning(conversation.id), log = $("messages");
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    this.#views.get(node)?.update({ isRunning, openCalls: isRunning ? [] : conversation.openCalls() });
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  #end(conversation, node) {
    this.#paint(conversation, node);
    this.#showButtons();
    $("said").textContent = "The answer is complete.";
    this.#saveUnlessDeleted(conversation);
  }

  #saveUnlessDeleted(conversation) {
    if (this.library.get(conversation.id)) this.library.save(conversation);
  }

  #turn(node, step) {
    this.#conversation.turn(node, step);
    this.render();
    this.library.save(this.#conversation);
  }

  #giveResult(call, text) {
    const conversation = this.#conversation;
    conversation.add(conversation.leaf, { role: "tool", callId: call.id, name: call.name, content: text });
    if (conversation.openCalls().length || !this.#answer(conversation.leaf)) {
      this.render();
      this.library.save(conversation);
    }
  }

  #showButtons() {
    const isBusy = this.isRunning(this.#conversation.id), isEmpty = this.#conversation.leaf === null;
    $("chat").classList.toggle("busy", isBusy);
    $("send").hidden = isBusy;
    $("stop-answer").hidden = !isBusy;
    $("export").hidden = isEmpty;
    $("messages").hidden = isEmpty;
    $("welcome").hidden = !isEmpty;
  }
}
