// SPDX-License-Identifier: Apache-2.0
// From two scrapes of /metrics to the figures that are shown: what view/figures.py does for the terminal.

const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Parse Prometheus text into a map from name to [{labels, value}]. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const space = line.lastIndexOf(" "), brace = line.indexOf("{");
    const name = line.slice(0, brace < 0 ? space : brace);
    const labels = {};
    if (brace >= 0) for (const [, key, value] of line.slice(brace, space).matchAll(LABEL)) labels[key] = value;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value: Number(line.slice(space + 1).replace("+Inf", "Infinity")) });
  }
  return samples;
}

const matches = (sample, labels) => Object.entries(labels).every(([key, value]) => sample.labels[key] === value);
const valueOf = (samples, name, labels = {}) =>
  (samples.get(name) ?? []).filter((s) => matches(s, labels)).reduce((sum, s) => sum + s.value, 0);

/** The mean over the engines that show something. */
function meanOf(samples, name) {
  const shown = (samples.get(name) ?? []).filter((s) => s.value);
  return shown.reduce((sum, s) => sum + s.value, 0) / Math.max(1, shown.length);
}

/** The values of a name by one label, those of all engines added up. */
function byLabel(samples, name, label) {
  const found = new Map();
  for (const s of samples.get(name) ?? []) found.set(s.labels[label], (found.get(s.labels[label]) ?? 0) + s.value);
  return found;
}

/** What a counter has grown by; one that fell began anew. */
function grown(before, now, name, labels) {
  const old = valueOf(before, name, labels), fresh = valueOf(now, name, labels);
  return fresh >= old ? fresh - old : fresh;
}

/** The median of a histogram's growth, as Prometheus' histogram_quantile gives it; null if nothing came. */
function median(before, now, name) {
  const fresh = byLabel(now, `${name}_bucket`, "le");
  let old = byLabel(before, `${name}_bucket`, "le");
  if ([...fresh].some(([bound, count]) => count < (old.get(bound) ?? 0))) old = new Map(); // began anew
  const bucketOf = ([bound, count]) => ({ bound: bound === "+Inf" ? Infinity : Number(bound), count: count - (old.get(bound) ?? 0) });
  const buckets = [...fresh].map(bucketOf).sort((a, b) => a.bound - b.bound);
  const total = buckets.at(-1)?.count ?? 0;
  if (total <= 0) return null;
  const place = buckets.findIndex((b) => b.count >= total / 2);
  const low = place > 0 ? buckets[place - 1] : { bound: 0, count: 0 };
  if (buckets[place].bound === Infinity) return low.bound;
  return low.bound + ((buckets[place].bound - low.bound) * (total / 2 - low.count)) / (buckets[place].count - low.count);
}

const ratio = (part, whole) => (whole > 0 ? part / whole : null);

/** The figures of the `seconds` between two scrapes. */
export function compare(before, now, seconds) {
  const engines = [...byLabel(now, "blink:engine_up", "engine").keys()];
  const grow = (name, labels) => engines.reduce((sum, engine) => sum + grown(before, now, name, { engine, ...labels }), 0);
  const steps = grow("blink:num_steps_total");
  const classes = ["latency_sensitive", "best_effort"].map((kind) => ({
    name: kind.replace("_", "-"),
    running: valueOf(now, "blink:requests_running_by_class", { class: kind }),
    waiting: valueOf(now, "blink:requests_waiting_by_class", { class: kind }),
  }));
  return {
    isUp: valueOf(now, "blink:engine_up") > 0,
    running: valueOf(now, "vllm:num_requests_running"),
    waiting: valueOf(now, "vllm:num_requests_waiting"),
    tokenRate: grow("vllm:generation_tokens_total") / seconds,
    promptRate: grow("vllm:prompt_tokens_total") / seconds,
    kvUse: valueOf(now, "vllm:kv_cache_usage_perc") / Math.max(1, engines.length),
    hitRate: ratio(grow("vllm:prefix_cache_hits_total"), grow("vllm:prefix_cache_queries_total")),
    firstToken: median(before, now, "vllm:time_to_first_token_seconds"),
    perToken: median(before, now, "vllm:inter_token_latency_seconds"),
    step: ratio(grow("blink:step_seconds_total"), steps),
    scheduling: ratio(grow("blink:scheduling_seconds_total"), steps),
    watts: grow("blink:energy_joules_total") / seconds || null,
    joulesPerToken: meanOf(now, "blink:joules_per_token") || null,
    classes,
    frontends: [...byLabel(now, "blink:frontend_sequences", "frontend")].map(([frontend, sequences]) => ({
      name: frontend,
      sequences,
      waiting: valueOf(now, "blink:frontend_waiting", { frontend }),
      tokenRate: grow("blink:frontend_tokens_total", { frontend }) / seconds,
    })),
  };
}

/** Joules for each token of the last minute, and watts, as far as they are known. */
export function formatEnergy({ joulesPerToken, watts }) {
  const parts = [joulesPerToken && `${joulesPerToken.toPrecision(3)} J`, watts && `${watts.toFixed(0)} W`];
  return parts.filter(Boolean).join(", ") || "–";
}

/** A duration with a unit that suits it. */
export function formatSeconds(seconds) {
  if (seconds === null) return "–";
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return `${(seconds * 1e6).toPrecision(3)} µs`;
}
