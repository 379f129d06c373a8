// SPDX-License-Identifier: Apache-2.0
// Buttons that copy a text.

import { make, makeButton } from "./dom.js";

const SHOWN = 1500; // milliseconds for which a button says that it has copied

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // A page without TLS from another machine has no such thing.
  const area = make("textarea", { value: text, className: "unseen" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Return a button that copies what `text()` then returns. */
export function copyButton(text) {
  const button = makeButton("Copy", async () => {
    try {
      await copyText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not permitted";
    }
    button.focus();
    setTimeout(() => (button.textContent = "Copy"), SHOWN);
  });
  return button;
}
