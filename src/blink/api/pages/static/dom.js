// SPDX-License-Identifier: Apache-2.0
// Elements of the page: found by their id, or made.

export const $ = (id) => document.getElementById(id);

/** Make an element with properties and children; a child that is a string becomes text. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Make a button; `label` is for those who hear the page, where the text alone says too little. */
export function makeButton(text, onClick, { label = "", className = "quiet" } = {}) {
  const button = make("button", { type: "button", className, textContent: text, title: label });
  if (label) button.setAttribute("aria-label", label);
  button.addEventListener("click", onClick);
  return button;
}
