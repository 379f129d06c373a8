# SPDX-License-Identifier: Apache-2.0
"""Latency-sensitive requests beside a flood that fills all slots, without HTTP: alone, in one class, as best effort.

The client drives a queue pair directly. Lengths are those of `blink bench`; a new request of the flood is sent whenever
one has ended. The trace ring says how long segments took, which is what an urgent request waits for at most.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
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


@dataclass
class Load:
    """What one run has sent and seen; times in seconds of this host."""

    sent: dict[int, float] = field(default_factory=dict[int, float])  # of urgent requests
    times: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    flood: set[int] = field(default_factory=set[int])
    flood_tokens: int = 0
    urgent_tokens: int = 0
    trace: np.ndarray = field(default_factory=lambda: np.zeros(0, TRACE_ENTRY))  # the newest launches beside the flood


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
    end, next_urgent, next_tick = begin + options.seconds, begin, 0.0
    while (now := time.monotonic()) < end or load.sent.keys() & load.times.keys() != load.sent.keys():
        if now > next_tick:
            next_tick = now + 0.25
            if lost := client.tick():
                raise SystemExit(lost)
        while len(load.flood) < flood and now < end:
            load.flood.add(flooding.submit(best_effort=best_effort))
        if next_urgent < now < end:
            next_urgent += 1 / options.rate
            sequence = urgent.submit(best_effort=False)
            load.sent[sequence] = time.monotonic()
        _collect(client, load, counted=begin < now < end)
    load.trace = np.sort(open_region(options.region).trace(), order="step")
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
    figures = {name: float(np.percentile(firsts, at)) for name, at in found.items()}
    figures |= {f"tpot_p{at}": float(np.percentile(gaps, at)) for at in (50, 99)}
    return figures | {
        "urgent_tok_s": load.urgent_tokens / seconds,
        "flood_tok_s": load.flood_tokens / seconds,
        "tok_s": (load.urgent_tokens + load.flood_tokens) / seconds,
    }


def segment_times(trace: np.ndarray) -> dict[str, float]:
    """Return how long the newest segments took, from launch to the pass that saw their end, in milliseconds."""
    followed = (trace["num_segments"][:-1] > 0) & (np.diff(trace["step"].astype(np.int64)) == 1)
    spans = (trace["retired_ns"][1:].astype(np.int64) - trace["launched_ns"][:-1].astype(np.int64))[followed] / 1e6
    if not len(spans):
        return {}
    return {"segments": len(spans)} | {f"segment_p{at}": float(np.percentile(spans, at)) for at in (50, 99)}


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
    parser.add_argument("--trace", type=Path, help="write the newest launches of the last run as JSON")
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
    results: dict[str, dict[str, float]] = {}
    for name in options.runs:
        load = run(client, options, 0 if name == "alone" else options.flood, best_effort=name == "flex")
        results[name] = summarise(load, options.seconds) | segment_times(load.trace)
        if options.trace:
            columns = {column: load.trace[column].tolist() for column in TRACE_ENTRY.names or ()}
            options.trace.write_text(json.dumps(columns))
        print(f"{name:>6} " + "  ".join(f"{key} {value:.2f}" for key, value in results[name].items()), flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))
    client.close()
    engine.stop()
    thread.join(10)


if __name__ == "__main__":
    main()
