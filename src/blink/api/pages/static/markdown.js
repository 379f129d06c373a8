// SPDX-License-Identifier: Apache-2.0
// Markdown of a model as nodes of the page. The text is hostile: its own markup stays text, its pictures become links,
// and what Marked makes of the rest passes DOMPurify.

import DOMPurify from "./libraries/purify.es.mjs";
import hljs from "./libraries/highlight.min.js";
import { Marked } from "./libraries/marked.esm.js";
import { copyButton } from "./copy.js";
import { make } from "./dom.js";
import { escape } from "./escape.js";
import { drawMath, mathExtensions } from "./math.js";

const HEADINGS = ["h1", "h2", "h3", "h4", "h5", "h6"], TABLE = ["table", "tbody", "td", "th", "thead", "tr"];
const SHORT = ["a", "br", "code", "del", "em", "kbd", "mark", "span", "strong", "sub", "sup", "u"];
const SAFE = ["align", "data-display", "data-lang", "data-tex", "start"]; // none of them holds an address
const PLAIN_TAG = /^<\/?(?:br|kbd|mark|sub|sup|u)\s*\/?>$/i; // of a model's own markup, what can only look like itself
const CLEAN = {
  ALLOWED_TAGS: [...HEADINGS, ...TABLE, ...SHORT, "blockquote", "hr", "li", "ol", "p", "pre", "ul"],
  ALLOWED_ATTR: ["href", "title", ...SAFE],
  ADD_URI_SAFE_ATTR: SAFE,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
const LONGEST = 50_000; // characters of code that get colours

const renderer = {
  html: ({ text, block }) => (PLAIN_TAG.test(text.trim()) ? text : block ? `<p>${escape(text)}</p>` : escape(text)),
  image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  code: ({ text, lang }) => `<pre><code data-lang="${escape(lang?.match(/^\S*/)[0] ?? "")}">${escape(text)}</code></pre>`,
};
const marked = new Marked({ gfm: true, renderer, extensions: mathExtensions });

/** Shows a Markdown text that grows: only blocks that changed are made anew. */
export class MarkdownView {
  #blocks = [];
  #links = "";

  constructor(root) {
    this.root = root;
  }

  show(text) {
    const tokens = marked.lexer(text), links = JSON.stringify(tokens.links);
    if (links !== this.#links) this.#cut(0); // blocks before may refer to a link that is now defined
    this.#links = links;
    const blocks = tokens.filter(({ type }) => type !== "space" && type !== "def");
    blocks.forEach((token, i) => this.#put(i, token));
    this.#cut(blocks.length);
  }

  #cut(count) {
    for (const { node } of this.#blocks.splice(count)) node.remove();
  }

  #put(i, token) {
    const old = this.#blocks[i];
    if (old?.raw === token.raw) return;
    const node = make("div", {}, makeNodes([token]));
    if (old) old.node.replaceWith(node);
    else this.root.append(node);
    drawMath(node);
    this.#blocks[i] = { raw: token.raw, node };
  }
}

function makeNodes(tokens) {
  const nodes = DOMPurify.sanitize(marked.parser(tokens), CLEAN);
  for (const link of nodes.querySelectorAll("a[href]")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of nodes.querySelectorAll("table")) wrap(table, "scroll");
  for (const code of nodes.querySelectorAll("pre > code")) frameCode(code);
  return nodes;
}

function wrap(node, className) {
  const frame = make("div", { className, tabIndex: 0 });
  node.replaceWith(frame);
  frame.append(node);
}

function frameCode(code) {
  const pre = code.parentNode, text = code.textContent, language = code.dataset.lang;
  const bar = make("div", {}, make("span", { textContent: language || "text" }), copyButton(() => text));
  const frame = make("div", { className: "code" }, bar);
  colour(code, text, language);
  pre.tabIndex = 0; // so that the keys scroll it
  pre.replaceWith(frame);
  frame.append(pre);
}

/** Give a code its language's colours, where the language is known. */
export function colour(code, text, language) {
  if (!hljs.getLanguage(language) || text.length > LONGEST) return;
  const { value } = hljs.highlight(text, { language, ignoreIllegals: true });
  code.replaceChildren(DOMPurify.sanitize(value, COLOURS));
}
