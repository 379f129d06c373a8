# SPDX-License-Identifier: Apache-2.0
"""Power and clocks of a GPU without a server, beside an idle one, and after a burst; and how soon an idle one answers.

The scheduler's pause between two looks is varied; a kernel of one thread that does nothing but sleep is measured too,
as the least that anything resident takes. On an H100 the pause made no difference: the driver keeps the clock up for
whatever is resident, and `nvidia-smi -lgc` lowers it. Nothing else may use the GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np
from engine_client import connect, ping
from gauge import Gauge
from gpu_occupants import SLEEPER, measure_occupant

from blink.config import EngineConfig, ModelConfig
from blink.errors import BlinkError
from blink.link.client import EngineClient
from blink.sampling_params import SamplingParams

SETTLE_SECONDS = 3.0
PING_PAUSE = 0.1  # seconds: the scheduler dozes again


def run_engine(region: str, model: Path, sleep_ns: int) -> None:
    """Serve until the parent ends this process."""
    from blink.engine import boot, device_scheduler

    device_scheduler.IDLE_SLEEP_NS = sleep_ns
    config = ModelConfig(model=str(model), load_format="dummy", max_model_len=4096)
    boot.run_engine(EngineConfig(region=region, model=config, device="cuda"))


def burst(client: EngineClient, rows: int, new_tokens: int) -> None:
    """Generate some sequences at once."""
    assert client.info is not None
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0.0)
    for row in range(rows):
        client.submit(np.full(100, row % client.info.vocab_size, np.int32), params, seed=0)
    while rows:
        rows -= sum(completion["finish_reason"] != 0 for completion in client.drain())


def measure_answers(client: EngineClient, count: int) -> dict[str, float]:
    """Return how long an idle scheduler takes to answer."""
    times: list[float] = []
    for _ in range(count):
        time.sleep(PING_PAUSE)
        before, _, after = ping(client)
        times.append((after - before) / 1e3)
    p50, p95 = np.percentile(times, [50, 95])
    return {"answer_p50_us": float(p50), "answer_p95_us": float(p95)}


def measure_server(gauge: Gauge, sleep_ns: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure one server from its start to its end."""
    region = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    engine = multiprocessing.get_context("spawn").Process(target=run_engine, args=(region, options.model, sleep_ns))
    engine.start()
    try:
        client = connect(region)
        time.sleep(SETTLE_SECONDS)
        found = {"idle": gauge.measure(options.seconds)}
        burst(client, options.rows, options.new_tokens)
        time.sleep(SETTLE_SECONDS)
        found["after a burst"] = gauge.measure(options.seconds)
        found["answers"] = measure_answers(client, options.pings)
        client.close()
        return found
    finally:
        engine.terminate()
        engine.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory with a config.json; weights are random")
    parser.add_argument("--sleep-us", type=float, nargs="+", default=[1, 20, 40, 100], help="pauses between two looks")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rows", type=int, default=64, help="sequences of the burst")
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--pings", type=int, default=50)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    try:
        gauge = Gauge(options.gpu)
    except BlinkError as error:
        raise SystemExit(f"idle_power.py: {error}") from None
    results: dict[str, Any] = {"no server": gauge.measure(options.seconds)}
    results[SLEEPER.name] = measure_occupant(gauge, SLEEPER, options.seconds, SETTLE_SECONDS)
    for name, found in results.items():
        print(f"{name}: {found['watts']:.1f} W at {found['sm_mhz']:.0f} MHz", flush=True)
    print(
        f"{'sleep us':>9} {'idle W':>8} {'MHz':>6} {'after a burst W':>16} {'MHz':>6} {'answer p50 us':>14} {'p95':>6}"
    )
    for sleep_us in options.sleep_us:
        found = results[f"{sleep_us:g}"] = measure_server(gauge, round(sleep_us * 1000), options)
        idle, later, answers = found["idle"], found["after a burst"], found["answers"]
        print(
            f"{sleep_us:>9g} {idle['watts']:>7.1f} {idle['sm_mhz']:>5.0f}"
            f" {later['watts']:>16.1f} {later['sm_mhz']:>5.0f}"
            f" {answers['answer_p50_us']:>14.0f} {answers['answer_p95_us']:>5.0f}",
            flush=True,
        )
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
