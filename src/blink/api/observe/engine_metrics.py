# SPDX-License-Identifier: Apache-2.0
"""The engine's statistics as metrics: vLLM's names where it has one, else Blink's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from blink import speculation
from blink.api.observe.exposition import Family, Labels
from blink.region.layout import Absent
from blink.region.step_tokens import BOUNDS, STATS

Stats = Mapping[str, int]  # empty while there is no engine

# Name, help and kind of vLLM's metrics that are the engine's statistics under another name.
_ENGINE_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens processed."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prompt_tokens_cached": ("prefix_hits", "Prompt tokens taken from the prefix cache."),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "external_prefix_cache_queries": ("host_queries", "Prompt tokens looked up in host memory."),
    "external_prefix_cache_hits": ("host_hits", "Prompt tokens restored from host memory."),
    "num_preemptions": ("num_preemptions", "Sequences preempted."),
    **speculation.COUNTERS,
}
_ENGINE_GAUGES = {
    "num_requests_running": ("num_running", "Sequences that run now."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait now."),
}
# vLLM's metrics of what is not here: always 0.
_ZERO_COUNTERS = {
    "mm_cache_queries": "Images looked up in a cache: there is none.",
    "mm_cache_hits": "Images found in a cache: there is none.",
}
# Statistics without an equivalent in vLLM, under their own names.
_BLINK_COUNTERS = {
    "num_steps": "Steps of the model.",
    "decode_launches": "Launches of graphs for decoding alone.",
    "mixed_launches": "Launches of graphs with prompt chunks.",
    "computed_tokens": "Tokens that went through the model, recomputed ones included.",
    "padded_tokens": "Tokens that filled graphs up to their size.",
    "num_parked": "Sequences that left their place to latency-sensitive ones but kept their blocks.",
    "host_blocks_stored": "Blocks that were copied to host memory as they were evicted.",
    "evicted_blocks": "Blocks evicted from the prefix cache.",
    "prefix_resets": "Times that the prefix cache was emptied on demand.",
    "kv_event_restarts": "Times that events of the KV cache began anew, as their ring was full.",
    "num_pauses": "Pauses that clients have asked for.",
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
    "num_host_blocks_used": "Blocks of the KV cache in host memory.",
    "num_blocks_cached": "Blocks that only the prefix cache holds.",
    "num_window_blocks": "Blocks of layers that see a window of the newest tokens; 0: there are no such layers.",
    "num_window_blocks_used": "Window blocks that sequences use now.",
    "num_window_blocks_cached": "Window blocks that only the prefix cache holds.",
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


@dataclass(frozen=True, slots=True)
class _Labelled:
    """A metric of vLLM's with a label, and how the value of each of its samples is read."""

    kind: str
    text: str
    label: str
    values: Mapping[str, Callable[[Stats], float]]


def _computed(stats: Stats) -> float:
    return max(stats.get("prompt_tokens", 0) - stats.get("prefix_hits", 0) - stats.get("host_hits", 0), 0)


def _hits(stats: Stats) -> float:
    return stats.get("prefix_hits", 0)


def _restored(stats: Stats) -> float:
    return stats.get("host_hits", 0)


def _count_of(stat: str) -> Callable[[Stats], float]:
    return lambda stats: stats.get(stat, 0)


def _is_awake(stats: Stats) -> bool:
    return bool(stats) and not (_naps(stats) or _sleeps_deep(stats))


def _naps(stats: Stats) -> bool:
    lacks = stats.get("absent", 0)
    return bool(lacks & (Absent.WEIGHTS | Absent.KV_CACHE)) and not lacks & Absent.DISCARDED


def _sleeps_deep(stats: Stats) -> bool:
    return bool(stats.get("absent", 0) & Absent.DISCARDED)


def _none(_: Stats) -> float:
    return 0


_LABELLED = {
    "num_requests_waiting_by_reason": _Labelled(
        "gauge",
        "Sequences that wait now, by reason.",
        "reason",
        {"capacity": lambda stats: stats.get("num_waiting", 0), "deferred": _none},
    ),
    "engine_sleep_state": _Labelled(
        "gauge",
        "1 for the state that the engine is in: awake, without its KV cache, or without its weights too.",
        "sleep_state",
        {"awake": _is_awake, "weights_offloaded": _naps, "discard_all": _sleeps_deep},
    ),
    "prompt_tokens_by_source": _Labelled(
        "counter",
        "Prompt tokens processed, by where their keys and values came from.",
        "source",
        {"local_compute": _computed, "local_cache_hit": _hits, "external_kv_transfer": _restored},
    ),
    speculation.ACCEPTED: _Labelled(
        "counter",
        speculation.ACCEPTED_TEXT,
        "position",
        {place: _count_of(stat) for place, stat in speculation.ACCEPTED_STATS.items()},
    ),
    "prompt_tokens_cached_by_source": _Labelled(
        "counter", "Prompt tokens taken from a cache, by where that is.", "source", {"device": _hits}
    ),
}


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
    for name, text in _ZERO_COUNTERS.items():
        yield one("counter", f"vllm:{name}", text, _reader(""))
    for name, labelled in _LABELLED.items():
        yield _labelled_family(f"vllm:{name}", labelled, labels)
    yield _iteration_family(labels)
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
    counts_energy, has_token_energy = known_energy(stats)
    if counts_energy:
        text = "Joules that the engine's GPU has used since it serves."
        yield one("counter", "blink:energy_joules", text, _reader("energy_mj", 1e-3))
    if has_token_energy:
        text = "Joules of the engine's GPU for each token generated in the last minute."
        yield one("gauge", "blink:joules_per_token", text, _reader("token_energy_uj", 1e-6))
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


def known_energy(stats: Stats) -> tuple[bool, bool]:
    """Say whether the GPU's energy is counted, and whether tokens were generated in the last minute."""
    return bool(stats.get("energy_mj")), bool(stats.get("token_energy_uj"))


def _iteration_family(labels: Labels) -> Family[Stats]:
    bounds = [*(repr(float(bound)) for bound in BOUNDS), "+Inf"]
    samples = (*(("_bucket", (*labels, ("le", bound))) for bound in bounds), ("_count", labels), ("_sum", labels))

    def read(stats: Stats) -> list[float]:
        *counts, total = (stats.get(name, 0) for name in STATS)
        cumulated = [*accumulate(counts)]
        return [*cumulated, cumulated[-1], total]

    return Family("vllm:iteration_tokens_total", "Tokens of a step of the model.", "histogram", samples, read)


def _labelled_family(name: str, metric: _Labelled, labels: Labels) -> Family[Stats]:
    ending = "_total" if metric.kind == "counter" else ""
    samples = tuple((ending, (*labels, (metric.label, value))) for value in metric.values)
    readers = tuple(metric.values.values())
    return Family(name, metric.text, metric.kind, samples, lambda stats: tuple(read(stats) for read in readers))


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
    return (cache_usage(stats),)


def cache_usage(stats: Stats) -> float:
    """Return the used share of the KV cache's blocks: of blocks or of window blocks, whichever is larger."""
    pools = ((stats.get(f"{pool}_used", 0), stats.get(pool, 0)) for pool in ("num_blocks", "num_window_blocks"))
    return max(used / max(1, blocks) for used, blocks in pools)
