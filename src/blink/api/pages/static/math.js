// SPDX-License-Identifier: Apache-2.0
// LaTeX in Markdown: $…$, $$…$$, \(…\) and \[…\], drawn by KaTeX, which is loaded when there is something to draw.

import { make } from "./dom.js";
import { escape } from "./escape.js";

const BLOCK = /^ {0,3}(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/;
// As in Pandoc's Markdown: no space after the first $ and before the last, no digit after it; so prices stay prices.
const INLINE = /^(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$(?!\s)((?:\\[^\n]|[^$\\\n])+?)(?<!\s)\$(?!\d))/;
// What a hostile formula may cost; links and styles of its own are off, as `trust` is.
const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", errorColor: "inherit", maxSize: 20, maxExpand: 300 };
const LONGEST = 5000; // characters

/** Return where a formula may begin; a block's begins a line. */
const startOf = (pattern, offset) => (src) => {
  const at = src.search(pattern);
  return at < 0 ? undefined : at + offset;
};
const token = (type, match, isDisplay) => ({ type, raw: match[0], tex: match.slice(1).find((part) => part !== undefined), isDisplay });
const markup = (tag) => ({ tex, isDisplay }) => `<${tag} data-tex="${escape(tex)}"${isDisplay ? ' data-display="1"' : ""}></${tag}>`;

/** Marked's extensions that leave a placeholder for each formula. */
export const mathExtensions = [
  {
    name: "mathBlock",
    level: "block",
    start: startOf(/\n {0,3}(?:\$\$|\\\[)/, 1),
    tokenizer(src) {
      const match = BLOCK.exec(src);
      return match ? token("mathBlock", match, true) : undefined;
    },
    renderer: markup("p"),
  },
  {
    name: "math",
    level: "inline",
    start: startOf(/\$|\\[([]/, 0),
    tokenizer(src) {
      const match = INLINE.exec(src);
      return match ? token("math", match, match[1] !== undefined || match[2] !== undefined) : undefined;
    },
    renderer: markup("span"),
  },
];

let katex = null, loading = null;

async function load() {
  document.head.append(make("link", { rel: "stylesheet", href: "page/libraries/katex.min.css" }));
  await import("./libraries/katex.min.js");
  katex = globalThis.katex;
}

/** Draw the formulas below an element; until KaTeX is there, and where it gives up, their source is shown. */
export function drawMath(root) {
  const places = [...root.querySelectorAll("[data-tex]")];
  if (!places.length) return;
  if (katex) return places.forEach(draw);
  for (const place of places) place.textContent = place.dataset.tex;
  loading ??= load();
  loading.then(() => places.forEach(draw), () => (loading = null));
}

function draw(place) {
  const tex = place.dataset.tex, displayMode = "display" in place.dataset;
  try {
    if (tex.length > LONGEST) throw new RangeError("too long");
    const tree = katex.__renderToDomTree(tex, { ...OPTIONS, displayMode });
    setStylesAside(tree);
    const node = tree.toNode();
    for (const each of node.querySelectorAll("[data-style]")) {
      each.style.cssText = each.dataset.style;
      delete each.dataset.style;
    }
    place.replaceChildren(node);
  } catch {
    place.textContent = tex;
    place.classList.add("undrawn");
  }
}

/** Rename attributes `style`, which the content security policy forbids; the same style set by script is allowed. */
function setStylesAside(node) {
  if (node.attributes?.style) {
    node.attributes["data-style"] = node.attributes.style;
    delete node.attributes.style;
  }
  node.children?.forEach(setStylesAside);
}
