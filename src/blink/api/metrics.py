# SPDX-License-Identifier: Apache-2.0
"""The metrics of /metrics under vLLM's names: requests are counted here, tokens and blocks by the engine."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from blink.api.engine_metrics import collect_engine
from blink.api.exposition import write_text
from blink.api.metric_store import MetricStore, Worker, add_up

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
MAX_GENERATION_TOKENS = "request_max_num_generation_tokens"
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
    MAX_GENERATION_TOKENS: ("Generated tokens of a request's longest sequence.", _LENGTH),
    PARAMS_N: ("The parameter n of a request.", _COUNT),
    PARAMS_MAX_TOKENS: ("The parameter max_tokens of a request.", _LENGTH),
}
FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTION_REASONS = ("queue_full", "engine_unavailable", "client_limit")
# What a worker holds now; of a dead one it means nothing.
WORKER_GAUGES = {
    "sequences": "Sequences of a frontend that are with the engine.",
    "waiting": "Sequences of a frontend that the engine has not admitted yet.",
}


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
    return layout, offset + len(WORKER_GAUGES)


_LAYOUT, NUM_VALUES = _lay_out()


class Store(Protocol):
    """Where the workers' numbers are."""

    def workers(self) -> list[Worker]:
        """Return the numbers of each worker."""
        ...


class MetricView:
    """Render what all workers of a region and its engine have counted."""

    def __init__(self, store: Store, engine_stats: Callable[[], Mapping[str, int]]) -> None:
        self._store = store
        self._engine_stats = engine_stats
        self.model_name = ""

    def render(self) -> bytes:
        """Return the Prometheus text."""
        return write_text(self.collect())

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        workers = self._store.workers()
        sums = add_up(workers) or [0.0] * NUM_VALUES
        yield from collect_engine(self._engine_stats(), [self.model_name, "0"])
        split = len(FINISH_REASONS)
        yield self._labelled("request_success", "Finished sequences.", "finished_reason", FINISH_REASONS, sums)
        yield self._labelled(
            "admission_rejections", "Requests refused with 503.", "reason", REJECTION_REASONS, sums[split:]
        )
        for name, (text, _) in _HISTOGRAMS.items():
            yield self._histogram(name, text, sums)
        yield from self._collect_workers([worker for worker in workers if worker.is_alive])

    def _collect_workers(self, workers: list[Worker]) -> Iterable[Metric]:
        labels = ["model_name", "engine", "frontend"]
        for place, (name, text) in enumerate(WORKER_GAUGES.items(), NUM_VALUES - len(WORKER_GAUGES)):
            gauge = GaugeMetricFamily(f"blink:frontend_{name}", text, labels=labels)
            for worker in workers:
                gauge.add_metric([self.model_name, "0", str(worker.pid)], worker.values[place])
            yield gauge
        tokens = CounterMetricFamily("blink:frontend_tokens", "Tokens that a frontend has received.", labels=labels)
        for worker in workers:
            tokens.add_metric([self.model_name, "0", str(worker.pid)], _count(worker, TTFT) + _count(worker, ITL))
        yield tokens

    def _labelled(self, name: str, text: str, label: str, values: tuple[str, ...], sums: list[float]) -> Metric:
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine", label])
        for value, total in zip(values, sums, strict=False):
            counter.add_metric([self.model_name, "0", value], total)
        return counter

    def _histogram(self, name: str, text: str, sums: list[float]) -> Metric:
        series = _LAYOUT[name]
        counts = sums[series.offset : series.offset + len(series.buckets) + 1]
        bounds = [*(repr(bound) for bound in series.buckets), "+Inf"]
        cumulated = accumulate(counts)
        total = sums[series.offset + len(series.buckets) + 1]
        histogram = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
        histogram.add_metric([self.model_name, "0"], list(zip(bounds, cumulated, strict=True)), sum_value=total)
        return histogram


class Metrics(MetricView):
    """Count what this worker sees, and render what all have."""

    def __init__(self, store: MetricStore, engine_stats: Callable[[], Mapping[str, int]]) -> None:
        super().__init__(store, engine_stats)
        self._own = store
        self._values = store.values

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

    def keep(self, sequences: int = 0, waiting: int = 0) -> None:
        """Note what this worker holds, and make up for files that somebody deleted; call it now and then."""
        self._own.restore()
        self._values = self._own.values
        self._values[NUM_VALUES - len(WORKER_GAUGES) :] = array("d", (sequences, waiting))

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        self._own.restore()
        self._values = self._own.values
        return super().collect()


def _count(worker: Worker, name: str) -> float:
    series = _LAYOUT[name]
    return sum(worker.values[series.offset : series.offset + len(series.buckets) + 1])
