// SPDX-License-Identifier: Apache-2.0
// Light or dark: as the system has it, or as the switch says. No module, so that it acts before the first paint.
"use strict";

(() => {
  const KEPT = "blink-theme";
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
  const WORDS = { auto: "as the system has it", light: "light", dark: "dark" };
  let theme = "auto";

  function apply() {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (!button) return;
    button.textContent = SIGNS[theme];
    button.title = button.ariaLabel = `Colours: ${WORDS[theme]}`;
  }

  try {
    theme = localStorage.getItem(KEPT) ?? "auto";
  } catch {
    // a browser that keeps nothing
  }
  if (!(theme in NEXT)) theme = "auto";
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      theme = NEXT[theme];
      apply();
      try {
        localStorage.setItem(KEPT, theme);
      } catch {
        // it holds until the page is closed
      }
    });
  });
})();
