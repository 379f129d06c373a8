# SPDX-License-Identifier: Apache-2.0
"""The scheduler itself under the load of `blink bench`, on a made-up clock: what its rules do to latency and energy.

Steps take what those of Llama-3-8B's shape take (on an H200; in FP8, in 4 bits and with "bf16-h100" on an H100) and
sample nothing: answers have the lengths that were asked for. Frontend and network are left out but for a constant in
each first token. Means over seeds. Joules are those of an H100, by a step's time and number of tokens, from two seconds
after the start to the last arrival.

Run with: python benchmarks/scheduler_simulation.py [--format int4] [--rates 8 32] [--set overtake_share=0,0.03]
or: --format bf16-h100 --set tpot_target_ms=0,10,15,20
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import os
import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from padding import padding_share

from blink.bench.arrivals import draw_arrivals
from blink.bench.config import LoadConfig
from blink.bench.lengths import Lengths, draw_lengths
from blink.config import EngineConfig
from blink.engine.geometry import build_geometry, graph_sizes
from blink.engine.state import HostState
from blink.link.queue_pair import QueuePair, Submission
from blink.link.shm import ShmLink
from blink.region.layout import BATCH_HEADER, GRAPH_COST, STEP_OUTPUT, CqeKind, StepKind, StepResult
from blink.region.memory import create_region, publish_region
from blink.region.native import lib
from blink.sampling_params import SamplingParams

MAX_MODEL_LEN, VOCAB, NUM_BLOCKS = 4096, 32000, 50_000


class Steps(NamedTuple):
    """What steps take: milliseconds without context, by their tokens, and picoseconds of each token of the context."""

    decoding: dict[int, float]
    with_prompts: dict[int, float]  # and rows that decode, or none
    kv_ps: int  # 131,072 bytes


# In 16 bits on an H200, the others about so on an H100: prompts are measured, rows less their context.
STEPS = {
    "bf16": Steps(
        {1: 3.62, 8: 3.62, 16: 3.74, 32: 3.92, 64: 4.36, 96: 5.07, 128: 5.3, 256: 7.65},
        {
            16: 3.95, 32: 4.18, 64: 4.45, 80: 4.71, 96: 4.98, 128: 5.12, 160: 5.5, 192: 6.1, 224: 6.5, 256: 7.3,
            320: 9.0, 384: 10.4, 448: 13.0, 512: 13.8, 640: 16.7, 768: 19.5, 1024: 24.7, 1536: 36.0, 2048: 48.9,
        },
        30_500,
    ),
    "bf16-h100": Steps(
        {1: 5.0, 8: 5.07, 32: 5.3, 64: 5.6, 128: 6.6, 256: 8.9},
        {16: 5.3, 32: 5.45, 64: 5.8, 128: 6.4, 256: 8.5, 512: 14.2, 1024: 25.5, 2048: 49.5},
        43_700,
    ),
    "fp8": Steps(
        {1: 2.6, 32: 3.3, 64: 4.2, 128: 4.8, 256: 6.3},
        {16: 2.9, 32: 3.4, 64: 4.52, 128: 4.8, 512: 7.77, 2048: 30.5},
        45_000,
    ),
    "int4": Steps(
        {1: 1.75, 8: 1.85, 16: 2.2, 32: 2.95, 64: 3.6, 96: 4.3, 128: 5.5, 256: 7.9},
        {
            16: 2.35, 32: 3.1, 64: 4.4, 96: 5.27, 128: 5.76, 192: 6.53, 256: 7.54, 384: 10.86, 512: 13.69, 1024: 25.0,
            2048: 50.0,
        },
        45_000,
    ),
}  # fmt: skip
LAUNCH_MS, JOIN_MS, BORDER_MS = 0.005, 0.09, 0.012  # behind decoding, with prompts, between segments
FRONTEND_MS = 0.9  # of a first token
SEGMENT_NS = 1_000_000
WATTS = {1: 581.0, 8: 594.0, 32: 656.0, 64: 703.0}  # while a step of so many tokens runs
RESTING_WATTS = 145.0  # between steps
SETTLE_NS = 2_000_000_000  # until energy counts


def interpolate(table: dict[int, float], tokens: int) -> float:
    """Return the table's value for so many tokens, on the line through its neighbours."""
    sizes = list(table)
    at = min(max(bisect.bisect_left(sizes, tokens), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    return table[low] + (table[high] - table[low]) * max(0, tokens - low) / (high - low)


@dataclass
class Answer:
    """When a request came, and when its tokens."""

    at_ns: int
    times: list[int] = field(default_factory=list)


class Simulation:
    """One server with one frontend, and the clock that both go by."""

    def __init__(self, config: EngineConfig, steps: Steps) -> None:
        self._steps = steps
        geometry = build_geometry(config, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB, num_blocks=NUM_BLOCKS)
        geometry["lease_timeout_ns"] = geometry["stall_timeout_ns"] = 10**15
        name = f"simulation-{os.getpid()}"
        self.region = create_region(name, geometry, "none")
        publish_region(self.region, name)
        self.state = HostState(self.region)
        self._costs = self._fill_costs(geometry)
        for kind in StepKind:
            self.state.array(kind.array("sampled_tokens"), "i4")[:] = 7
        self.now = 1_000_000_000
        self.answers: dict[int, Answer] = {}
        self.launches: list[np.void] = []
        self.sizes = graph_sizes(geometry)
        self.preempting = self._segment_ns = 0
        self._used: list[tuple[int, int, float]] = []  # of each launch: when, its time, joules
        self.pair = QueuePair(ShmLink(self.region, 0))
        self.pair.request_attach()
        while not self.pair.is_attached():
            self._pass()
        self.pair.start()

    def _fill_costs(self, geometry: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        costs = self.state.array("costs", GRAPH_COST)
        num_decode, steps = int(geometry["num_decode_graphs"]), self._steps
        for graph, (tokens, rows) in enumerate(graph_sizes(geometry)):
            base = interpolate(steps.decoding if graph < num_decode else steps.with_prompts, tokens) * 1e6
            usual = base + steps.kv_ps / 1e3 * rows * 512
            costs[graph] = (int(base), steps.kv_ps, int(np.ceil(usual / SEGMENT_NS)) if usual > 1.5 * SEGMENT_NS else 1)
        return costs.copy()

    def close(self) -> None:
        self.region.path.unlink()
        self.region.close()

    def run(self, arrivals: list[float], lengths: list[Lengths]) -> None:
        """Serve all requests to their end."""
        start = self.now
        coming = [(start + int(at * 1e9), found) for at, found in zip(arrivals, lengths, strict=True)]
        ends_at: int | None = None
        while coming or ends_at or self.pair.num_live:
            wakes_at = ends_at or int(self.state.struct["held_until_ns"]) or None
            if coming and (wakes_at is None or coming[0][0] < wakes_at):
                self.now, found = coming.pop(0)
                self._submit(found)
            else:
                assert wakes_at is not None, "the scheduler is idle, and a sequence is not at its end"
                self.now = wakes_at
                if ends_at:
                    self._finish()
                ends_at = None
            if self._pass() == StepResult.LAUNCHED:
                took = self._duration_ns()
                self._use(took)
                ends_at = self.now + took
            self._collect()

    def joules_per_token(self) -> float:
        """Return joules per token while requests came; what is left at the end has few rows."""
        arrivals = [answer.at_ns for answer in self.answers.values()]
        begin, end = min(arrivals) + SETTLE_NS, max(arrivals)
        counted = [(took, joules) for at, took, joules in self._used if begin <= at < end]
        resting = (end - begin - sum(took for took, _ in counted)) / 1e9 * RESTING_WATTS
        tokens = sum(begin <= at < end for answer in self.answers.values() for at in answer.times)
        return (sum(joules for _, joules in counted) + resting) / tokens

    def _use(self, took_ns: int) -> None:
        """Note the energy of a launch."""
        tokens = min(int(self.launches[-1]["num_tokens"]), max(WATTS))
        self._used.append((self.now, took_ns, took_ns / 1e9 * interpolate(WATTS, tokens)))

    def _submit(self, found: Lengths) -> None:
        prompt = np.full(found.input_len, len(self.answers) % VOCAB, np.int32)
        params = SamplingParams(max_tokens=found.output_len, ignore_eos=True, temperature=0.0)
        sequence = self.pair.submit(Submission(prompt, (), 0, b""), params)
        self.answers[sequence] = Answer(self.now)

    def _pass(self) -> StepResult:
        return StepResult(lib.blink_step(self.state.address, self.now))

    def _array(self, name: str, dtype: np.dtype[Any]) -> Any:
        return self.state.array(StepKind(int(self.state.struct["in_flight_kind"])).array(name), dtype)

    def _finish(self) -> None:
        self._array("output", STEP_OUTPUT)[0]["done_step"] = self._array("header", BATCH_HEADER)[0]["step"]

    def _duration_ns(self) -> int:
        """Return what the launch takes, with the time until the next one: by the table, not by what was learned."""
        trace = self.region.trace()
        entry = trace[int(self.state.struct["step"]) % len(trace)].copy()
        self.launches.append(entry)
        kv_tokens, segments = int(self.state.struct["account"]["kv_tokens"]), int(entry["num_segments"])
        self.preempting += segments == 0 and int(self.state.struct["num_segments"]) > 0
        took = int(self._costs[int(entry["graph"])]["base_ns"]) + kv_tokens * self._steps.kv_ps // 1000
        if segments:
            if entry["segment"] == 0:
                self._segment_ns = took // segments
            return self._segment_ns + int(BORDER_MS * 1e6)
        gap = LAUNCH_MS if entry["num_tokens"] == entry["num_decode_rows"] else JOIN_MS
        return took + int(gap * 1e6)

    def _collect(self) -> None:
        for completion in self.pair.drain():
            if completion["kind"] == CqeKind.TOKEN:
                self.answers[int(completion["sequence"])].times.append(int(completion["time_ns"]))


def simulate(config: EngineConfig, steps: Steps, rate: float, duration: float, seed: int) -> dict[str, float]:
    """Return the latencies of one load, in milliseconds, how often a prompt overtook for each request, and padding."""
    load = LoadConfig()
    arrivals = draw_arrivals(rate, duration, 0, np.random.default_rng([seed, 5]))
    lengths = draw_lengths(load, len(arrivals), np.random.default_rng([seed, 2]))
    simulation = Simulation(config, steps)
    try:
        simulation.run(arrivals, lengths)
    finally:
        simulation.close()
    answers = simulation.answers.values()
    first = [(answer.times[0] - answer.at_ns) / 1e6 + FRONTEND_MS for answer in answers]
    each = [(a.times[-1] - a.times[0]) / 1e6 / (len(a.times) - 1) for a in answers if len(a.times) > 1]
    between = np.concatenate([np.diff(answer.times) for answer in answers]) / 1e6
    found = {f"ttft_p{part}": float(np.percentile(first, part)) for part in (50, 90, 99)}
    found |= {f"tpot_p{part}": float(np.percentile(each, part)) for part in (50, 99)}
    found["joules"] = simulation.joules_per_token()
    found |= {"itl_p99": float(np.percentile(between, 99)), "preempting": simulation.preempting / len(answers)}
    return found | {"padding": padding_share(np.array(simulation.launches), simulation.sizes)}


def main() -> None:
    """Print a line for each rate and setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=STEPS, default="bf16")
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 8, 32, 48])
    parser.add_argument("--duration", type=float, default=12.0, help="seconds of arrivals")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--set", default="overtake_share=0,0.03", help="an option of the engine and its values")
    options = parser.parse_args()
    name, _, values = options.set.partition("=")
    heads = "TTFT p50   p90   p99   TPOT p50   p99   ITL p99   preempting/request  padding %  J/token"
    print(f"{'req/s':>6} {name:>20}   {heads}", flush=True)
    for rate, value in itertools.product(options.rates, values.split(",")):
        changes: dict[str, Any] = {name: float(value)}
        config = EngineConfig(
            max_num_seqs=options.max_num_seqs, max_num_batched_tokens=2048, enable_prefix_caching=False,
            num_queue_pairs=1, **changes,
        )  # fmt: skip
        runs = [simulate(config, STEPS[options.format], rate, options.duration, seed) for seed in range(options.seeds)]
        mean = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        print(
            f"{rate:6g} {value:>20}   {mean['ttft_p50']:8.2f} {mean['ttft_p90']:5.1f} {mean['ttft_p99']:5.1f}"
            f"   {mean['tpot_p50']:8.2f} {mean['tpot_p99']:5.2f}   {mean['itl_p99']:7.2f}   {mean['preempting']:18.2f}"
            f"  {100 * mean['padding']:9.1f}  {mean['joules']:7.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
