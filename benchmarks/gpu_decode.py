# SPDX-License-Identifier: Apache-2.0
"""Time per output token of the GPU engine and the scheduler's share of it, at several batch sizes, without HTTP.

The client drives a queue pair directly; token times are the GPU's. The scheduler's time from the end of a step to the
launch of the next is read from its trace ring.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from blink.client import EngineClient
from blink.config import EngineConfig, ModelConfig
from blink.engine.engine import create_engine
from blink.layout import CqeKind
from blink.region import open_region
from blink.sampling_params import SamplingParams

PROMPT_TOKENS = 185


def connect(region: str) -> EngineClient:
    client = EngineClient(region, engine_timeout=5.0)
    while not client.ready:
        client.tick()
        time.sleep(0.02)
    return client


def run_batch(client: EngineClient, rows: int, new_tokens: int) -> float:
    """Generate `rows` sequences at once; return the median over them of milliseconds per token after the first."""
    assert client.info is not None
    chance = np.random.default_rng(rows)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0.0)
    times: dict[int, list[int]] = {}
    for _ in range(rows):
        prompt = chance.integers(0, client.info.vocab_size, PROMPT_TOKENS).astype(np.int32)
        times[client.submit(prompt, params, seed=0)] = []
    open_sequences, next_tick = rows, 0.0
    while open_sequences:
        if time.monotonic() > next_tick:
            next_tick = time.monotonic() + 0.25
            if lost := client.tick():
                raise SystemExit(lost)
        for completion in client.drain():
            if completion["kind"] == CqeKind.TOKEN:
                times[int(completion["sequence"])].append(int(completion["time_ns"]))
            open_sequences -= completion["finish_reason"] != 0
    return statistics.median((stamps[-1] - stamps[0]) / 1e6 / (len(stamps) - 1) for stamps in times.values())


def launch_delays(region: str, rows: int) -> np.ndarray:
    """Microseconds from the end of a step to the launch of the next, for the traced decode steps of `rows` rows."""
    trace = open_region(region).trace()
    steady = (trace["step"] > 0) & (trace["idle_before"] == 0) & (trace["num_tokens"] == trace["num_decode_rows"])
    found = trace[steady & (trace["num_rows"] == rows)]
    return (found["launched_ns"].astype(np.int64) - found["retired_ns"].astype(np.int64)) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory with a config.json; weights are random")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    region = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    model = ModelConfig(model=str(options.model), load_format="dummy", max_model_len=4096)
    engine = create_engine(EngineConfig(region=region, model=model, device="cuda", enable_prefix_caching=False))
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    client = connect(region)
    run_batch(client, 1, 8)
    results: dict[int, dict[str, float]] = {}
    for rows in options.rows:
        tpot = statistics.median(run_batch(client, rows, options.new_tokens) for _ in range(options.repeats))
        delays = launch_delays(region, rows)
        p50, p99 = np.percentile(delays, [50, 99]) if len(delays) else (np.nan, np.nan)
        results[rows] = {"tpot_ms": tpot, "launch_p50_us": float(p50), "launch_p99_us": float(p99)}
    client.close()
    engine.stop()
    thread.join(10)
    print(f"{'rows':>6} {'TPOT ms':>9} {'end to launch p50 us':>21} {'p99 us':>8}")
    for rows, found in results.items():
        print(f"{rows:>6} {found['tpot_ms']:>9.3f} {found['launch_p50_us']:>21.1f} {found['launch_p99_us']:>8.1f}")
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
