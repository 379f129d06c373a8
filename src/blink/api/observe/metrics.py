# SPDX-License-Identifier: Apache-2.0
"""The metrics of /metrics under vLLM's names: requests are counted here, tokens and blocks by the engine."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

from prometheus_client.core import Metric

from blink.api.observe.engine_metrics import Stats, cache_config, engine_families, known_energy
from blink.api.observe.exposition import Family, Labels, Page, merge_families
from blink.api.observe.http_metrics import NUM_HTTP_VALUES, count_request, http_families, rows_with_requests
from blink.api.observe.metric_store import MetricStore, Worker, add_up

# vLLM's buckets with finer ones below: the first tokens of a small model come within a millisecond.
_FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_FIRST_TOKEN += (20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_TOKEN += (10.0, 20.0, 40.0, 80.0)
_REQUEST = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0)
_REQUEST += (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_LENGTH = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_COUNT = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

TTFT = "time_to_first_token_seconds"
ITL = "inter_token_latency_seconds"
TPOT = "request_time_per_output_token_seconds"
E2E = "e2e_request_latency_seconds"
QUEUE = "request_queue_time_seconds"
INFERENCE = "request_inference_time_seconds"
PREFILL = "request_prefill_time_seconds"
DECODE = "request_decode_time_seconds"
PROMPT_TOKENS = "request_prompt_tokens"
COMPUTED_TOKENS = "request_prefill_kv_computed_tokens"
GENERATION_TOKENS = "request_generation_tokens"
MAX_GENERATION_TOKENS = "request_max_num_generation_tokens"
PREEMPTIONS = "request_num_preemptions"
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
    COMPUTED_TOKENS: ("Prompt tokens of a request that were not taken from the prefix cache.", _LENGTH),
    GENERATION_TOKENS: ("Generated tokens of a request.", _LENGTH),
    MAX_GENERATION_TOKENS: ("Generated tokens of a request's longest sequence.", _LENGTH),
    PREEMPTIONS: ("How often a sequence was preempted, up to 255.", _PREEMPTIONS),
    PARAMS_N: ("The parameter n of a request.", _COUNT),
    PARAMS_MAX_TOKENS: ("The parameter max_tokens of a request.", _LENGTH),
}
FINISH_REASONS = ("stop", "length", "abort", "error")
_OTHER_REASON = "repetition"  # that vLLM knows: always 0
REJECTION_REASONS = ("queue_full", "engine_unavailable", "client_limit")
# What a worker holds now; of a dead one it means nothing.
WORKER_GAUGES = {
    "sequences": "Sequences of a frontend that are with the engine.",
    "waiting": "Sequences of a frontend that the engine has not admitted yet.",
}


class _Series(NamedTuple):
    offset: int  # of the counts
    sum_at: int
    buckets: tuple[float, ...]

    def counts(self, values: Sequence[float]) -> Sequence[float]:
        """Return how many values are in each bucket, and above the last."""
        return values[self.offset : self.sum_at]

    def read(self, values: Sequence[float]) -> list[float]:
        """Return the samples of a Prometheus histogram: cumulated counts, all, and the sum of what was observed."""
        cumulated = [*accumulate(self.counts(values))]
        return [*cumulated, cumulated[-1], values[self.sum_at]]


def _lay_out() -> tuple[dict[str, _Series], int]:
    """Give each histogram its counts (one more than it has bounds) and its sum, after the counters."""
    offset = len(FINISH_REASONS) + len(REJECTION_REASONS)
    layout: dict[str, _Series] = {}
    for name, (_, buckets) in _HISTOGRAMS.items():
        layout[name] = _Series(offset, offset + len(buckets) + 1, buckets)
        offset += len(buckets) + 2
    return layout, offset


_LAYOUT, _GAUGES = _lay_out()  # what a worker holds now is behind the histograms
_PER_ENGINE = _GAUGES + len(WORKER_GAUGES)  # the values of HTTP requests are behind those of all engines
NUM_VALUES = _PER_ENGINE + NUM_HTTP_VALUES


def num_values(num_engines: int) -> int:
    """Return how many numbers a worker before so many engines has."""
    return NUM_VALUES + (num_engines - 1) * _PER_ENGINE


def num_engines_of(count: int) -> int:
    """Return how many engines a worker with so many numbers has; at least one."""
    return max(1, (count - NUM_HTTP_VALUES) // _PER_ENGINE)


class Store(Protocol):
    """Where the workers' numbers are."""

    def workers(self) -> list[Worker]:
        """Return the numbers of each worker."""
        ...


Values = Sequence[float]
Look = tuple[list[Stats], list[Values], list[Worker]]  # each engine's numbers, the workers' sums, those that live


class MetricView:
    """Render what all workers of a server and its engines have counted."""

    def __init__(self, store: Store, engine_stats: Sequence[Callable[[], Stats]]) -> None:
        """Look at a store, and at the statistics of each engine."""
        self._store = store
        self._engine_stats = engine_stats
        self._http = len(engine_stats) * _PER_ENGINE
        self.model_name = ""
        self._form: tuple[object, ...] = ()
        self._pages = (Page[Sequence[Stats]](()), Page[Sequence[Values]](()), Page[list[Worker]](()))

    def render(self) -> bytes:
        """Return the Prometheus text."""
        stats, sums, workers = self.look()
        of_engines, of_requests, of_workers = self._pages
        return of_engines.write(stats) + of_requests.write(sums) + of_workers.write(workers)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        stats, sums, workers = self.look()
        of_engines, of_requests, of_workers = self._pages
        yield from of_engines.collect(stats)
        yield from of_requests.collect(sums)
        yield from of_workers.collect(workers)

    def look(self) -> Look:
        """Return the numbers of now, and see that the pages fit them."""
        stats = [read() for read in self._engine_stats]
        all_workers = self._store.workers()
        alive = [worker for worker in all_workers if worker.is_alive]
        sums = add_up(all_workers) or [0.0] * num_values(len(stats))
        engines = range(len(stats))
        parts: list[Values] = [*(sums[_PER_ENGINE * engine :][:_PER_ENGINE] for engine in engines), sums[self._http :]]
        rows = rows_with_requests(parts[-1])
        known = [(cache_config(each), known_energy(each)) for each in stats]
        form = (self.model_name, known, rows, [worker.pid for worker in alive])
        if form != self._form:
            labels = [(("model_name", self.model_name), ("engine", str(engine))) for engine in engines]
            of_engines = merge_families([engine_families(*each) for each in zip(stats, labels, strict=True)])
            of_requests = merge_families([*map(_request_families, labels), http_families(rows, 0)])
            self._pages = Page(of_engines), Page(of_requests), Page(_worker_families(labels, alive))
            self._form = form
        return stats, parts, alive


def _request_families(labels: Labels) -> Iterator[Family[Sequence[float]]]:
    samples = tuple(("_total", (*labels, ("finished_reason", each))) for each in (*FINISH_REASONS, _OTHER_REASON))
    text = "Finished sequences."
    yield Family("vllm:request_success", text, "counter", samples, lambda sums: [*sums[: len(FINISH_REASONS)], 0.0])
    yield _counts(
        "admission_rejections", "Requests refused with 503.", "reason", REJECTION_REASONS, labels, len(FINISH_REASONS)
    )
    for name, (text, buckets) in _HISTOGRAMS.items():
        bounds = [*(repr(bound) for bound in buckets), "+Inf"]
        samples = (*(("_bucket", (*labels, ("le", bound))) for bound in bounds), ("_count", labels), ("_sum", labels))
        yield Family(f"vllm:{name}", text, "histogram", samples, _LAYOUT[name].read)


def _counts(
    name: str, text: str, label: str, values: tuple[str, ...], labels: Labels, offset: int = 0
) -> Family[Sequence[float]]:
    samples = tuple(("_total", (*labels, (label, value))) for value in values)
    return Family(f"vllm:{name}", text, "counter", samples, lambda sums: sums[offset : offset + len(values)])


def _worker_families(labels: Sequence[Labels], workers: list[Worker]) -> Iterator[Family[list[Worker]]]:
    """Yield the metrics of what each worker has with each engine."""
    theirs = [(*each, ("frontend", str(worker.pid))) for each in labels for worker in workers]
    offsets = range(0, len(labels) * _PER_ENGINE, _PER_ENGINE)
    for place, (name, text) in enumerate(WORKER_GAUGES.items(), _GAUGES):
        samples = tuple(("", each) for each in theirs)
        yield Family(f"blink:frontend_{name}", text, "gauge", samples, partial(_values_at, place, offsets))
    text, samples = "Tokens that a frontend has received.", tuple(("_total", each) for each in theirs)
    yield Family("blink:frontend_tokens", text, "counter", samples, partial(_count_tokens, offsets))


def _values_at(place: int, offsets: Sequence[int], workers: list[Worker]) -> list[float]:
    return [worker.values[offset + place] for offset in offsets for worker in workers]


def _count_tokens(offsets: Sequence[int], workers: list[Worker]) -> list[float]:
    series = (_LAYOUT[TTFT], _LAYOUT[ITL])
    return [sum(sum(each.counts(worker.values[o:])) for each in series) for o in offsets for worker in workers]


class EngineMetrics:
    """Count what this worker sees of one engine."""

    def __init__(self, values: memoryview[float]) -> None:
        self.values = values

    def observe(self, name: str, value: float) -> None:
        """Add one value to a histogram."""
        offset, sum_at, buckets = _LAYOUT[name]
        values = self.values
        values[offset + bisect_left(buckets, value)] += 1
        values[sum_at] += value

    def count_finished(self, reason: str) -> None:
        """Count a finished sequence by its finish reason."""
        self.values[FINISH_REASONS.index(reason)] += 1

    def count_rejection(self, reason: str) -> None:
        """Count a request that was refused for lack of room or of an engine."""
        self.values[len(FINISH_REASONS) + REJECTION_REASONS.index(reason)] += 1

    def keep(self, sequences: int, waiting: int) -> None:
        """Note what this worker holds."""
        self.values[_GAUGES:] = array("d", (sequences, waiting))


class Metrics(MetricView):
    """Count what this worker sees, and render what all have."""

    def __init__(self, store: MetricStore, engine_stats: Sequence[Callable[[], Stats]]) -> None:
        super().__init__(store, engine_stats)
        self._own = store
        self._engines = [EngineMetrics(store.values[:0]) for _ in engine_stats]
        self._take_values()

    def of(self, engine: int) -> EngineMetrics:
        """Return what counts for one engine."""
        return self._engines[engine]

    def count_rejection(self, reason: str) -> None:
        """Count a request that was refused; it came to no engine, and the first one's labels stand for that."""
        self._engines[0].count_rejection(reason)

    def count_http(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count an HTTP request that has ended."""
        count_request(self._own.values[self._http :], method, path, status, seconds)

    def keep(self, held: Sequence[tuple[int, int]]) -> None:
        """Note the sequences that this worker has with each engine, and how many of them wait; call it now and then.

        Files that somebody deleted are made up for.
        """
        self._own.restore()
        self._take_values()
        for engine, counts in zip(self._engines, held, strict=True):
            engine.keep(*counts)

    def _take_values(self) -> None:
        for index, engine in enumerate(self._engines):
            engine.values = self._own.values[_PER_ENGINE * index :][:_PER_ENGINE]
