// SPDX-License-Identifier: Apache-2.0
// One message on the page: its text, reasoning, calls, figures and buttons.

import { describeThinking, describeTimes } from "./answer.js";
import { copyButton } from "./copy.js";
import { make, makeButton } from "./dom.js";
import { MarkdownView, colour } from "./markdown.js";

/** Write JSON over several lines; other text stays. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function codeBlock(text) {
  const code = make("code", { textContent: pretty(text) });
  colour(code, code.textContent, "json");
  return make("pre", { tabIndex: 0 }, code);
}

const NAMES = { user: "Question", assistant: "Answer", tool: "Result" };

class View {
  /** `actions` has edit(node, text), regenerate(node), turn(node, step) and giveResult(call, text). */
  constructor(node, actions) {
    Object.assign(this, { node, actions, root: make("li", { className: node.role, ariaLabel: NAMES[node.role] }) });
  }

  /** Show the node as it is now. */
  update() {}

  /** Return the buttons for the versions of this message; nothing where there is one. */
  versionButtons(versions) {
    if (versions.length < 2) return [];
    const at = versions.indexOf(this.node), { turn } = this.actions;
    const earlier = makeButton("‹", () => turn(this.node, -1), { label: "Earlier version", className: "quiet changes" });
    const later = makeButton("›", () => turn(this.node, 1), { label: "Later version", className: "quiet changes" });
    [earlier.disabled, later.disabled] = [at === 0, at === versions.length - 1];
    return [make("span", { className: "versions" }, earlier, `${at + 1}/${versions.length}`, later)];
  }
}

class QuestionView extends View {
  constructor(node, actions, versions) {
    super(node, actions);
    const edit = makeButton("Edit", () => this.#edit(), { className: "quiet changes" });
    this.parts = [
      make("div", { className: "body", textContent: node.content }),
      make("footer", {}, ...this.versionButtons(versions), copyButton(() => node.content), edit),
    ];
    this.root.append(...this.parts);
  }

  #edit() {
    const area = make("textarea", { value: this.node.content, rows: 3, ariaLabel: "Edit the question" });
    const close = () => {
      this.root.replaceChildren(...this.parts);
      this.root.classList.remove("editing");
    };
    const buttons = make("div", { className: "buttons" }, makeButton("Cancel", close, { className: "" }), make("button", { className: "main", textContent: "Send" }));
    const form = make("form", {}, area, buttons);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) this.actions.edit(this.node, area.value.trim());
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.root.replaceChildren(form);
    this.root.classList.add("editing");
    area.focus();
  }
}

class ResultView extends View {
  constructor(node, actions) {
    super(node, actions);
    const summary = make("summary", {}, "Result of ", make("code", { textContent: node.name }));
    this.root.append(make("details", { className: "call" }, summary, codeBlock(node.content)));
  }
}

class AnswerView extends View {
  constructor(node, actions, versions) {
    super(node, actions);
    this.body = make("div", { className: "body markdown" });
    this.text = new MarkdownView(this.body);
    const thoughts = make("div", { className: "markdown" });
    this.thoughts = new MarkdownView(thoughts);
    this.thinking = make("details", { className: "thinking", hidden: true }, make("summary"), thoughts);
    this.calls = make("div", { className: "calls" });
    this.figures = make("small");
    const again = makeButton("Regenerate", () => actions.regenerate(node), { className: "quiet changes" });
    const buttons = [...this.versionButtons(versions), copyButton(() => node.content), again];
    this.root.append(this.thinking, this.body, this.calls, make("footer", {}, ...buttons, this.figures));
  }

  /** `openCalls` are those whose result the model waits for. */
  update({ isRunning = false, openCalls = [] } = {}) {
    const { node } = this;
    this.root.classList.toggle("streaming", isRunning);
    this.root.classList.toggle("failed", Boolean(node.failed));
    this.root.ariaBusy = String(isRunning);
    this.text.show(node.content);
    this.thinking.hidden = !node.reasoning;
    this.thinking.firstChild.textContent = describeThinking(node, isRunning);
    if (node.reasoning) this.thoughts.show(node.reasoning);
    this.calls.replaceChildren(...node.calls.map((call) => this.#showCall(call, openCalls.includes(call))));
    this.figures.textContent = isRunning ? "" : describeTimes(node);
  }

  #showCall(call, isOpen) {
    const summary = make("summary", {}, "Calls ", make("code", { textContent: call.name }));
    const details = make("details", { className: "call", open: true }, summary, codeBlock(call.arguments));
    if (isOpen) details.append(this.#resultForm(call));
    return details;
  }

  #resultForm(call) {
    const area = make("textarea", { rows: 2, placeholder: "What the tool returns", ariaLabel: `Result of ${call.name}` });
    const form = make("form", {}, area, make("div", { className: "buttons" }, make("button", { textContent: "Give the result" })));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.giveResult(call, area.value);
    });
    return form;
  }
}

/** Return the view of a message that has these versions. */
export function makeView(node, actions, versions) {
  const kind = { user: QuestionView, assistant: AnswerView, tool: ResultView }[node.role];
  return new kind(node, actions, versions);
}
