// SPDX-License-Identifier: Apache-2.0
// The live state: scrapes /metrics each second while it is looked at, and draws small charts.

import { compare, formatEnergy, formatSeconds, parseMetrics } from "./figures.js";

const INTERVAL = 1000, POINTS = 120, WINDOW = 5; // milliseconds, scrapes in a chart, scrapes between two compared
const SVG = "http://www.w3.org/2000/svg";
const percent = (part) => (part === null ? "–" : `${(100 * part).toFixed(1)} %`);
const TILES = [
  ["Tokens per second", (f) => f.tokenRate, (f) => `${f.tokenRate.toFixed(1)} out, ${f.promptRate.toFixed(1)} in`],
  ["Sequences", (f) => f.running + f.waiting, (f) => `${f.running} running, ${f.waiting} waiting`],
  ["First token (median)", (f) => f.firstToken, (f) => formatSeconds(f.firstToken)],
  ["Time per token (median)", (f) => f.perToken, (f) => formatSeconds(f.perToken)],
  ["KV cache in use", (f) => f.kvUse, (f) => percent(f.kvUse), 1],
  ["Prompt tokens found in the cache", (f) => f.hitRate, (f) => percent(f.hitRate), 1],
  ["A step takes", (f) => f.step, (f) => formatSeconds(f.step)],
  ["Energy per token, power", (f) => f.joulesPerToken, formatEnergy],
  ["From a step to the next launch", (f) => f.scheduling, (f) => formatSeconds(f.scheduling)],
];

export class StateView {
  #scrapes = [];
  #timer = 0;
  #tiles;

  constructor(root) {
    this.root = root;
    this.#tiles = TILES.map(([label]) => this.#addTile(label));
  }

  /** Look as long as this is so. */
  set isShown(shown) {
    clearInterval(this.#timer);
    if (!shown) return;
    this.#scrapes = [];
    this.#look();
    this.#timer = setInterval(() => document.hidden || this.#look(), INTERVAL);
  }

  async #look() {
    let text;
    try {
      const response = await fetch("metrics", { cache: "no-store" });
      if (!response.ok) return;
      text = await response.text();
    } catch {
      return; // the header says that nobody answers
    }
    this.#scrapes.push({ at: performance.now(), samples: parseMetrics(text) });
    if (this.#scrapes.length < 2) return;
    if (this.#scrapes.length > WINDOW) this.#scrapes.shift();
    const first = this.#scrapes[0], last = this.#scrapes.at(-1);
    this.#draw(compare(first.samples, last.samples, (last.at - first.at) / 1000));
  }

  #addTile(label) {
    const figure = document.createElement("figure");
    const caption = figure.appendChild(document.createElement("figcaption"));
    const output = figure.appendChild(document.createElement("output"));
    const svg = figure.appendChild(document.createElementNS(SVG, "svg"));
    const line = svg.appendChild(document.createElementNS(SVG, "polyline"));
    caption.textContent = label;
    svg.setAttribute("viewBox", `0 0 ${POINTS - 1} 40`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    this.root.querySelector("#tiles").append(figure);
    return { output, line, past: [] };
  }

  #draw(figures) {
    TILES.forEach(([, value, show, top], i) => {
      const { output, line, past } = this.#tiles[i];
      past.push(value(figures) ?? 0);
      if (past.length > POINTS) past.shift();
      output.textContent = show(figures);
      const most = top ?? (Math.max(...past) || 1);
      line.setAttribute("points", past.map((v, x) => `${x},${(39 - (38 * v) / most).toFixed(2)}`).join(" "));
    });
    this.#fill("#classes", figures.classes.map((c) => [c.name, c.running, c.waiting]));
    this.#fill("#frontends", figures.frontends.map((f) => [f.name, f.sequences, f.waiting, f.tokenRate.toFixed(1)]));
  }

  #fill(table, rows) {
    const cells = (row) => row.map((text) => Object.assign(document.createElement("td"), { textContent: text }));
    const lines = rows.map((row) => {
      const line = document.createElement("tr");
      line.append(...cells(row));
      return line;
    });
    this.root.querySelector(`${table} tbody`).replaceChildren(...lines);
  }
}
