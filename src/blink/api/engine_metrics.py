# SPDX-License-Identifier: Apache-2.0
"""The engine's statistics as metrics: vLLM's names where it has one, else Blink's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

# Name, help and kind of vLLM's metrics that are the engine's statistics under another name.
_ENGINE_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens processed."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prompt_tokens_cached": ("prefix_hits", "Prompt tokens taken from the prefix cache."),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("num_preemptions", "Sequences preempted."),
}
_ENGINE_GAUGES = {
    "num_requests_running": ("num_running", "Sequences that run now."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait now."),
}
# Statistics without an equivalent in vLLM, under their own names.
_BLINK_COUNTERS = {
    "num_steps": "Steps of the model.",
    "decode_launches": "Launches of graphs for decoding alone.",
    "mixed_launches": "Launches of graphs with prompt chunks.",
    "computed_tokens": "Tokens that went through the model, recomputed ones included.",
    "padded_tokens": "Tokens that filled graphs up to their size.",
    "num_parked": "Sequences that left their place to latency-sensitive ones but kept their blocks.",
    "evicted_blocks": "Blocks evicted from the prefix cache.",
    "prefix_resets": "Times that the prefix cache was emptied on demand.",
    "finished_error": "Sequences that ended with an error: nothing could be sampled from their logits.",
    "num_rejected": "Submissions that the scheduler refused.",
    "automata_loaded": "Automata of structured outputs that the engine has taken in.",
    "expired_leases": "Frontends that were silent for too long.",
    "heartbeat": "Signs of life of the scheduler.",
}
_BLINK_SECONDS = {
    "step": ("running_ns", "Seconds in which a step was in flight."),
    "scheduling": ("scheduling_ns", "Seconds between the end of a step, or of idleness, and the next launch."),
}
_BLINK_GAUGES = {
    "num_automata_used": "Automata that sequences use now.",
    "num_blocks_cached": "Blocks that only the prefix cache holds.",
    "worker_sequences": "Sequences of the worker that answers this scrape.",
    "prompt_arena_used_bytes": "Prompt memory in use by the worker that answers this scrape.",
}
# Statistics of all requests, of which those of the best-effort class are counted apart: name, help, all, theirs.
_GAUGES_BY_CLASS = (
    ("requests_running", "Sequences that run now.", "num_running", "num_running_best_effort"),
    ("requests_waiting", "Sequences that wait now.", "num_waiting", "num_waiting_best_effort"),
)
_COUNTERS_BY_CLASS = (
    ("prefix_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries", "best_effort_prefix_queries"),
    ("prefix_hits", "Prompt tokens found in the prefix cache.", "prefix_hits", "best_effort_prefix_hits"),
)
CLASSES = ("latency_sensitive", "best_effort")
_LABELS = ("model_name", "engine")


def collect_engine(stats: Mapping[str, int], values: list[str]) -> Iterator[Metric]:
    """Yield the metrics of an engine's statistics (none while it is away) under these label values."""
    yield _gauge("blink:engine_up", "Whether this frontend has an engine that is ready.", bool(stats), values)
    for name, (stat, text) in _ENGINE_GAUGES.items():
        yield _gauge(f"vllm:{name}", text, stats.get(stat, 0), values)
    blocks = stats.get("num_blocks", 0)
    usage = stats.get("num_blocks_used", 0) / blocks if blocks else 0.0
    yield _gauge("vllm:kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.", usage, values)
    for name, (stat, text) in _ENGINE_COUNTERS.items():
        yield _counter(f"vllm:{name}", text, stats.get(stat, 0), values)
    for name, text in _BLINK_COUNTERS.items():
        yield _counter(f"blink:{name}", text, stats.get(name, 0), values)
    for name, (stat, text) in _BLINK_SECONDS.items():
        yield _counter(f"blink:{name}_seconds", text, stats.get(stat, 0) * 1e-9, values)
    for name, text in _BLINK_GAUGES.items():
        yield _gauge(f"blink:{name}", text, stats.get(name, 0), values)
    yield from _collect_classes(stats, values)
    if blocks:
        yield _cache_config(stats, values)


def _collect_classes(stats: Mapping[str, int], values: list[str]) -> Iterable[Metric]:
    labels = [*_LABELS, "class"]
    for kind, table in ((GaugeMetricFamily, _GAUGES_BY_CLASS), (CounterMetricFamily, _COUNTERS_BY_CLASS)):
        for name, text, total, of_best_effort in table:
            family = kind(f"blink:{name}_by_class", f"{text[:-1]}, by class.", labels=labels)
            theirs = stats.get(of_best_effort, 0)
            for label, value in zip(CLASSES, (stats.get(total, 0) - theirs, theirs), strict=True):
                family.add_metric([*values, label], value)
            yield family


def _cache_config(stats: Mapping[str, int], values: list[str]) -> Metric:
    """Return vLLM's gauge that is always 1 and tells the size of the KV cache in its labels."""
    info = InfoMetricFamily("vllm:cache_config", "The KV cache.", labels=_LABELS)
    shown = {
        "block_size": str(stats.get("block_size", 0)),
        "num_gpu_blocks": str(stats["num_blocks"]),
        "enable_prefix_caching": str(bool(stats.get("prefix_caching", 0))),
    }
    info.add_metric(values, shown)
    return info


def _gauge(name: str, text: str, value: float, values: list[str]) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=_LABELS)
    gauge.add_metric(values, value)
    return gauge


def _counter(name: str, text: str, value: float, values: list[str]) -> Metric:
    counter = CounterMetricFamily(name, text, labels=_LABELS)
    counter.add_metric(values, value)
    return counter
