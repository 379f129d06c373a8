# SPDX-License-Identifier: Apache-2.0
"""The engine's statistics as metrics: vLLM's names where it has one, else Blink's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from blink.api.observe.exposition import Family, Labels

Stats = Mapping[str, int]  # empty while there is no engine

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
    "held": ("held_ns", "Seconds in which steps waited, as no token was due: --tpot-target-ms."),
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


def engine_families(stats: Stats, labels: Labels) -> Iterator[Family[Stats]]:
    """Yield the metrics of an engine's statistics; its cache is told of as it is in these."""

    def one(kind: str, name: str, text: str, read: Callable[[Stats], tuple[float]]) -> Family[Stats]:
        return Family(name, text, kind, (("_total" if kind == "counter" else "", labels),), read)

    yield one("gauge", "blink:engine_up", "Whether this frontend has an engine that is ready.", _is_up)
    for name, (stat, text) in _ENGINE_GAUGES.items():
        yield one("gauge", f"vllm:{name}", text, _reader(stat))
    yield one("gauge", "vllm:kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.", _cache_usage)
    for name, (stat, text) in _ENGINE_COUNTERS.items():
        yield one("counter", f"vllm:{name}", text, _reader(stat))
    for name, text in _BLINK_COUNTERS.items():
        yield one("counter", f"blink:{name}", text, _reader(name))
    for name, (stat, text) in _BLINK_SECONDS.items():
        yield one("counter", f"blink:{name}_seconds", text, _reader(stat, 1e-9))
    for name, text in _BLINK_GAUGES.items():
        yield one("gauge", f"blink:{name}", text, _reader(name))
    for kind, table in (("gauge", _GAUGES_BY_CLASS), ("counter", _COUNTERS_BY_CLASS)):
        for name, text, total, of_best_effort in table:
            ending = "_total" if kind == "counter" else ""
            samples = tuple((ending, (*labels, ("class", each))) for each in CLASSES)
            read = _class_reader(total, of_best_effort)
            yield Family(f"blink:{name}_by_class", f"{text[:-1]}, by class.", kind, samples, read)
    if shown := cache_config(stats):
        # vLLM's gauge that is always 1 and tells the size of the KV cache in its labels.
        yield Family("vllm:cache_config", "The KV cache.", "info", (("_info", (*labels, *shown)),), lambda _: (1.0,))


def cache_config(stats: Stats) -> Labels:
    """Return the labels that describe the KV cache; none while there is no engine."""
    if not stats.get("num_blocks", 0):
        return ()
    return (
        ("block_size", str(stats.get("block_size", 0))),
        ("num_gpu_blocks", str(stats["num_blocks"])),
        ("enable_prefix_caching", str(bool(stats.get("prefix_caching", 0)))),
    )


def _reader(stat: str, scale: float = 1.0) -> Callable[[Stats], tuple[float]]:
    return lambda stats: (stats.get(stat, 0) * scale,)


def _class_reader(total: str, of_best_effort: str) -> Callable[[Stats], tuple[float, float]]:
    def read(stats: Stats) -> tuple[float, float]:
        theirs = stats.get(of_best_effort, 0)
        return stats.get(total, 0) - theirs, theirs

    return read


def _is_up(stats: Stats) -> tuple[float]:
    return (bool(stats),)


def _cache_usage(stats: Stats) -> tuple[float]:
    blocks = stats.get("num_blocks", 0)
    return (stats.get("num_blocks_used", 0) / blocks if blocks else 0.0,)
