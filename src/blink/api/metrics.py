# SPDX-License-Identifier: Apache-2.0
"""The metrics of /metrics under vLLM's names: requests are counted here, tokens and blocks by the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from blink.api.metric_store import MetricStore

# vLLM's buckets with finer ones below: the first tokens of a small model come within a millisecond.
_FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_FIRST_TOKEN += (20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_TOKEN += (10.0, 20.0, 40.0, 80.0)
_REQUEST = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0)
_REQUEST += (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_LENGTH = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_COUNT = (1.0, 2.0, 5.0, 10.0, 20.0)

TTFT = "time_to_first_token_seconds"
ITL = "inter_token_latency_seconds"
TPOT = "request_time_per_output_token_seconds"
E2E = "e2e_request_latency_seconds"
QUEUE = "request_queue_time_seconds"
INFERENCE = "request_inference_time_seconds"
PREFILL = "request_prefill_time_seconds"
DECODE = "request_decode_time_seconds"
PROMPT_TOKENS = "request_prompt_tokens"
GENERATION_TOKENS = "request_generation_tokens"
PARAMS_N = "request_params_n"
PARAMS_MAX_TOKENS = "request_params_max_tokens"

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    TTFT: ("Seconds from the request to its first token.", _FIRST_TOKEN),
    ITL: ("Seconds between tokens of a sequence, by the engine's clock.", _TOKEN),
    TPOT: ("Mean seconds per token of a request after its first.", _TOKEN),
    E2E: ("Seconds from the request to its last token.", _REQUEST),
    QUEUE: ("Seconds from the request until the engine admits it.", _REQUEST),
    INFERENCE: ("Seconds from admission to the last token.", _REQUEST),
    PREFILL: ("Seconds from admission to the first token.", _REQUEST),
    DECODE: ("Seconds from the first token to the last.", _REQUEST),
    PROMPT_TOKENS: ("Prompt tokens of a request.", _LENGTH),
    GENERATION_TOKENS: ("Generated tokens of a request.", _LENGTH),
    PARAMS_N: ("The parameter n of a request.", _COUNT),
    PARAMS_MAX_TOKENS: ("The parameter max_tokens of a request.", _LENGTH),
}
FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTION_REASONS = ("queue_full", "engine_unavailable", "client_limit")


@dataclass(frozen=True, slots=True)
class _Series:
    offset: int
    buckets: tuple[float, ...]


def _lay_out() -> tuple[dict[str, _Series], int]:
    """Give each histogram its counts (one more than it has bounds) and its sum, after the counters."""
    offset = len(FINISH_REASONS) + len(REJECTION_REASONS)
    layout: dict[str, _Series] = {}
    for name, (_, buckets) in _HISTOGRAMS.items():
        layout[name] = _Series(offset, buckets)
        offset += len(buckets) + 2
    return layout, offset


_LAYOUT, NUM_VALUES = _lay_out()

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
    "finished_error": "Sequences that ended with an error: nothing could be sampled from their logits.",
    "num_rejected": "Submissions that the scheduler refused.",
    "automata_loaded": "Automata of structured outputs that the engine has taken in.",
    "expired_leases": "Frontends that were silent for too long.",
}
_BLINK_GAUGES = {
    "num_automata_used": "Automata that sequences use now.",
    "num_blocks_cached": "Blocks that only the prefix cache holds.",
    "worker_sequences": "Sequences of the worker that answers this scrape.",
    "prompt_arena_used_bytes": "Prompt memory in use by the worker that answers this scrape.",
}


class Metrics:
    """Count what this worker sees, and render what all workers and the engine have counted."""

    def __init__(self, store: MetricStore, engine_stats: Callable[[], Mapping[str, int]]) -> None:
        self._store = store
        self._values = store.values
        self._engine_stats = engine_stats
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.model_name = ""

    def observe(self, name: str, value: float) -> None:
        """Add one value to a histogram."""
        series = _LAYOUT[name]
        self._values[series.offset + bisect_left(series.buckets, value)] += 1
        self._values[series.offset + len(series.buckets) + 1] += value

    def count_finished(self, reason: str) -> None:
        """Count a finished sequence by its finish reason."""
        self._values[FINISH_REASONS.index(reason)] += 1

    def count_rejection(self, reason: str) -> None:
        """Count a request that was refused for lack of room or of an engine."""
        self._values[len(FINISH_REASONS) + REJECTION_REASONS.index(reason)] += 1

    def keep(self) -> None:
        """Make up for files that somebody deleted; call it now and then."""
        self._store.restore()
        self._values = self._store.values

    def render(self) -> bytes:
        """Return the Prometheus text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics (called by the registry)."""
        self.keep()
        sums = self._store.sum()
        yield from self._collect_engine(self._engine_stats())
        split = len(FINISH_REASONS)
        yield self._labelled("request_success", "Finished sequences.", "finished_reason", FINISH_REASONS, sums)
        yield self._labelled(
            "admission_rejections", "Requests refused with 503.", "reason", REJECTION_REASONS, sums[split:]
        )
        for name, (text, _) in _HISTOGRAMS.items():
            yield self._histogram(name, text, sums)

    def _collect_engine(self, stats: Mapping[str, int]) -> Iterable[Metric]:
        labels, values = ["model_name", "engine"], [self.model_name, "0"]
        for name, (stat, text) in _ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
            gauge.add_metric(values, stats.get(stat, 0))
            yield gauge
        blocks = stats.get("num_blocks", 0)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.", labels=labels)
        usage.add_metric(values, stats.get("num_blocks_used", 0) / blocks if blocks else 0.0)
        yield usage
        for name, (stat, text) in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
            counter.add_metric(values, stats.get(stat, 0))
            yield counter
        for name, text in _BLINK_COUNTERS.items():
            counter = CounterMetricFamily(f"blink:{name}", text, labels=labels)
            counter.add_metric(values, stats.get(name, 0))
            yield counter
        for name, text in _BLINK_GAUGES.items():
            gauge = GaugeMetricFamily(f"blink:{name}", text, labels=labels)
            gauge.add_metric(values, stats.get(name, 0))
            yield gauge

    def _labelled(self, name: str, text: str, label: str, values: tuple[str, ...], sums: list[float]) -> Metric:
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine", label])
        for value, total in zip(values, sums, strict=False):
            counter.add_metric([self.model_name, "0", value], total)
        return counter

    def _histogram(self, name: str, text: str, sums: list[float]) -> Metric:
        series = _LAYOUT[name]
        counts = sums[series.offset : series.offset + len(series.buckets) + 1]
        bounds = [*(repr(bound) for bound in series.buckets), "+Inf"]
        cumulated = [sum(counts[: place + 1]) for place in range(len(counts))]
        total = sums[series.offset + len(series.buckets) + 1]
        histogram = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
        histogram.add_metric([self.model_name, "0"], list(zip(bounds, cumulated, strict=True)), sum_value=total)
        return histogram
