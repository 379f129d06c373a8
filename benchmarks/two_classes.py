# SPDX-License-Identifier: Apache-2.0
"""Latency-sensitive requests beside a flood that fills all slots, without HTTP: alone, in one class, as best effort.

The client drives a queue pair directly. Lengths are those of `blink bench`; a new request of the flood is sent whenever
one has ended: with more of them than the engine has slots, first come, first served lets urgent requests wait for
seconds. The trace ring says how long segments took, and when the step was launched that an urgent request waited for;
the engine's clock is followed by the completions that arrived the soonest.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from engine_client import connect

from blink.bench.config import LoadConfig
from blink.bench.lengths import draw_lengths
from blink.config import EngineConfig, ModelConfig
from blink.engine.boot import create_engine
from blink.link.client import EngineClient
from blink.region.layout import TRACE_ENTRY, CqeKind
from blink.region.memory import open_region
from blink.sampling_params import SamplingParams

_CLOCK_SECONDS = 0.5  # around a request, in which some completion arrives at once


@dataclass
class Load:
    """What one run has sent and seen; times in seconds of this host."""

    sent: dict[int, float] = field(default_factory=dict[int, float])  # of urgent requests
    times: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    flood: set[int] = field(default_factory=set[int])
    flood_tokens: int = 0
    urgent_tokens: int = 0
    traces: list[np.ndarray] = field(default_factory=list[np.ndarray])  # launches, each some of them twice
    admitted_ns: dict[int, int] = field(default_factory=dict[int, int])  # of urgent requests, by the engine's clock
    clocks: list[tuple[float, float]] = field(
        default_factory=list[tuple[float, float]]
    )  # this host's, and what it is ahead

    @property
    def trace(self) -> np.ndarray:
        """The launches, in their order."""
        return np.unique(np.concatenate(self.traces)) if self.traces else np.zeros(0, TRACE_ENTRY)


class Sender:
    """Submits requests of drawn lengths."""

    def __init__(self, client: EngineClient, seed: int) -> None:
        self._client = client
        self._chance = np.random.default_rng(seed)
        self._lengths = iter(draw_lengths(LoadConfig(), 100_000, self._chance))

    def submit(self, *, best_effort: bool) -> int:
        lengths = next(self._lengths)
        assert self._client.info is not None
        prompt = self._chance.integers(256, self._client.info.vocab_size, lengths.input_len).astype(np.int32)
        params = SamplingParams(
            max_tokens=lengths.output_len, ignore_eos=True, temperature=0.0, best_effort=best_effort
        )
        return self._client.submit(prompt, params, seed=0)


def run(client: EngineClient, options: argparse.Namespace, flood: int, *, best_effort: bool) -> Load:
    """Send urgent requests at a steady rate for some seconds, beside `flood` other sequences; cancel what is left."""
    load = Load()
    flooding, urgent = Sender(client, 1), Sender(client, 2)
    begin = time.monotonic() + (options.settle if flood else 0)
    end, next_urgent, next_tick, region = begin + options.seconds, begin, 0.0, open_region(options.region)
    while (now := time.monotonic()) < end or load.sent.keys() & load.times.keys() != load.sent.keys():
        if now > next_tick:
            next_tick = now + 0.25
            if lost := client.tick():
                raise SystemExit(lost)
            load.traces.append(region.trace().copy())
        while len(load.flood) < flood and now < end:
            load.flood.add(flooding.submit(best_effort=best_effort))
        if next_urgent < now < end:
            next_urgent += 1 / options.rate
            sequence = urgent.submit(best_effort=False)
            load.sent[sequence] = time.monotonic()
        _collect(client, load, counted=begin < now < end)
    load.traces.append(region.trace().copy())
    for sequence in load.flood:
        client.cancel(sequence)
    while load.flood or any(times[-1] > 0 for times in load.times.values()):
        client.tick()
        _collect(client, load, counted=False)
    return load


def _collect(client: EngineClient, load: Load, *, counted: bool) -> None:
    now = time.monotonic()
    for completion in client.drain():
        sequence = int(completion["sequence"])
        load.clocks.append((now, now - int(completion["time_ns"]) / 1e9))
        if completion["kind"] == CqeKind.ADMITTED and sequence in load.sent:
            load.admitted_ns[sequence] = int(completion["time_ns"])
        if completion["kind"] == CqeKind.TOKEN:
            if sequence in load.flood:
                load.flood_tokens += counted
            else:
                load.urgent_tokens += counted
                load.times.setdefault(sequence, []).append(now)
        if completion["finish_reason"]:
            load.flood.discard(sequence)
            if sequence in load.times:
                load.times[sequence].append(-1.0)  # it has ended


def summarise(load: Load, seconds: float) -> dict[str, float]:
    """Return the figures of one run, in milliseconds and tokens per second."""
    firsts = [(times[0] - load.sent[sequence]) * 1e3 for sequence, times in load.times.items()]
    gaps = [(t[-2] - t[0]) / (len(t) - 2) * 1e3 for t in load.times.values() if len(t) > 3]
    found = {"ttft_p50": 50, "ttft_p99": 99}
    figures = {name: float(np.percentile(firsts, at)) for name, at in found.items()} | {
        "ttft_mean": float(np.mean(firsts))
    }
    figures |= {f"tpot_p{at}": float(np.percentile(gaps, at)) for at in (50, 99)}
    return figures | {
        "urgent_tok_s": load.urgent_tokens / seconds,
        "flood_tok_s": load.flood_tokens / seconds,
        "tok_s": (load.urgent_tokens + load.flood_tokens) / seconds,
    }


def launch_waits(load: Load) -> dict[str, float]:
    """Return how long urgent requests waited for the launch of their own step, in milliseconds."""
    if not load.flood_tokens:
        return {}
    launched = np.sort(load.trace["launched_ns"]).astype(np.int64)
    seconds, ahead = np.array(load.clocks).T
    waits: list[float] = []
    for sequence, admitted in load.admitted_ns.items():
        near = np.abs(seconds - load.sent[sequence]) < _CLOCK_SECONDS
        arrived = (load.sent[sequence] - float(ahead[near].min())) * 1e9
        after = np.searchsorted(launched, admitted)
        if after < len(launched):
            waits.append((float(launched[after]) - arrived) / 1e6)
    return {f"wait_p{at}": float(np.percentile(waits, at)) for at in (50, 99)}


def segment_times(trace: np.ndarray) -> dict[str, float]:
    """Return how long segments took, from launch to the pass that saw their end, in milliseconds."""
    followed = (trace["num_segments"][:-1] > 0) & (np.diff(trace["step"].astype(np.int64)) == 1)
    spans = (trace["retired_ns"][1:].astype(np.int64) - trace["launched_ns"][:-1].astype(np.int64))[followed] / 1e6
    if not len(spans):
        return {}
    return {f"segment_p{at}": float(np.percentile(spans, at)) for at in (50, 99)}


def show(name: str, figures: dict[str, float]) -> None:
    print(f"{name:>6} " + "  ".join(f"{key} {value:.2f}" for key, value in figures.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory with a config.json; weights are random")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rate", type=float, default=2.0, help="urgent requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds of the flood before it is counted")
    parser.add_argument("--flood", type=int, default=300, help="sequences of the flood that are open")
    parser.add_argument("--urgent-tpot-target-ms", type=float, default=0.0)
    parser.add_argument("--runs", nargs="+", default=["alone", "one", "flex"], choices=("alone", "one", "flex"))
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--trace", type=Path, help="write the launches of the last run as JSON")
    parser.add_argument("--repeats", type=int, default=1, help="of all runs; medians are printed")
    options = parser.parse_args()
    options.region = region = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    config = EngineConfig(
        region=region,
        model=ModelConfig(model=str(options.model), load_format="dummy", max_model_len=4096),
        device=options.device,
        enable_prefix_caching=False,
        urgent_tpot_target_ms=options.urgent_tpot_target_ms,
    )
    engine = create_engine(config)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    client = connect(region)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.runs}
    for name in options.runs * options.repeats:
        load = run(client, options, 0 if name == "alone" else options.flood, best_effort=name == "flex")
        found[name].append(summarise(load, options.seconds) | segment_times(load.trace) | launch_waits(load))
        show(name, found[name][-1])
        if options.trace:
            columns = {column: load.trace[column].tolist() for column in TRACE_ENTRY.names or ()}
            options.trace.write_text(json.dumps(columns))
    results = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()
    }
    if options.repeats > 1:
        print(f"medians of {options.repeats}:")
        for name, figures in results.items():
            show(name, figures)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))
    client.close()
    engine.stop()
    thread.join(10)


if __name__ == "__main__":
    main()
