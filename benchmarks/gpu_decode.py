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

from blink.config import EngineConfig, ModelConfig
from blink.engine.boot import create_engine
from blink.link.client import EngineClient
from blink.link.shm import ShmConnector
from blink.models.spec import ModelSpec
from blink.models.weights.source import read_spec
from blink.region.layout import CqeKind
from blink.region.memory import open_region
from blink.sampling_params import SamplingParams

PROMPT_TOKENS = 185
BANDWIDTH = 4.5e12  # bytes per second that reading reaches on an H200


def connect(region: str) -> EngineClient:
    client = EngineClient(ShmConnector(region), engine_timeout=5.0)
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


def read_launches(region: str, rows: int) -> dict[str, float]:
    """Time from the end of a step to the launch of the next, over the traced decode steps of `rows` rows.

    Also its share of the steps' time: that in which no kernel of the model runs, but for the launch's own way.
    """
    trace = np.sort(open_region(region).trace(), order="step")
    steady = (trace["step"] > 0) & (trace["idle_before"] == 0) & (trace["num_tokens"] == trace["num_decode_rows"])
    steady &= trace["num_rows"] == rows
    launched, retired = (trace[name].astype(np.int64) for name in ("launched_ns", "retired_ns"))
    delays = (launched - retired)[steady] / 1e3
    followed = steady[1:] & steady[:-1] & (np.diff(trace["step"].astype(np.int64)) == 1)
    if not followed.any():
        return {"launch_p50_us": np.nan, "launch_p99_us": np.nan, "launch_share": np.nan}
    p50, p99 = np.percentile(delays, [50, 99])
    share = (launched - retired)[1:][followed].sum() / np.diff(launched)[followed].sum()
    return {"launch_p50_us": float(p50), "launch_p99_us": float(p99), "launch_share": float(share)}


def floor_ms(spec: ModelSpec, rows: int) -> float:
    """Least milliseconds of a step: the bfloat16 weights that it reads, over the bandwidth that reads reach.

    Of a mixture of experts, those that `rows` tokens are expected to choose, if they choose evenly. Keys and values
    are left out.
    """
    read = spec.num_parameters - (0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size)
    if spec.num_experts:
        unread = (1 - spec.experts_per_token / spec.num_experts) ** rows
        experts = 3 * spec.hidden_size * spec.moe_intermediate_size * spec.num_experts * spec.num_layers
        read -= int(unread * experts)
    return read * 2 / BANDWIDTH * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory with a config.json; weights are random")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    region = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    spec = read_spec(options.model)
    model = ModelConfig(model=str(options.model), load_format="dummy", max_model_len=4096)
    engine = create_engine(EngineConfig(region=region, model=model, device="cuda", enable_prefix_caching=False))
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    client = connect(region)
    run_batch(client, 1, 8)
    results: dict[int, dict[str, float]] = {}
    for rows in options.rows:
        tpot = statistics.median(run_batch(client, rows, options.new_tokens) for _ in range(options.repeats))
        results[rows] = {"tpot_ms": tpot, "floor_ms": floor_ms(spec, rows), **read_launches(region, rows)}
    client.close()
    engine.stop()
    thread.join(10)
    print(f"{'rows':>6} {'TPOT ms':>9} {'floor ms':>9} {'end to launch p50 us':>21} {'p99 us':>8} {'share %':>8}")
    for rows, found in results.items():
        print(
            f"{rows:>6} {found['tpot_ms']:>9.3f} {found['floor_ms']:>9.3f} {found['launch_p50_us']:>21.1f}"
            f" {found['launch_p99_us']:>8.1f} {found['launch_share'] * 100:>8.2f}"
        )
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
