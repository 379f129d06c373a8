# SPDX-License-Identifier: Apache-2.0
"""The scheduler's own time per step on one CPU core: between a step's end and the next launch, and of a whole pass.

The model answers in no time and outside the measurement: every step samples the same token for all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.engine.state import HostState
from blink.errors import OverloadedError
from blink.link.queue_pair import QueuePair, Submission
from blink.link.shm import ShmLink
from blink.region.layout import BATCH_HEADER, STEP_OUTPUT, StepResult
from blink.region.memory import create_region, publish_region
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from blink.text.prompt import hash_blocks, hash_root

MAX_MODEL_LEN = 8192
VOCAB = 32000
CLOCK_NOW = 0  # tells the native step to read the machine's clock


@dataclass(frozen=True)
class Case:
    """A load: so many sequences that only decode, and perhaps arrivals and ends beside them all the time."""

    name: str
    num_running: int
    arrivals: bool = False


CASES = (Case("1 decoding", 1), Case("64 decoding", 64), Case("256 decoding", 256), Case("mixed", 128, arrivals=True))


class Stepper:
    """A scheduler without a model, its only frontend in the same thread."""

    def __init__(self) -> None:
        config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=2048, num_queue_pairs=4)
        num_blocks = 256 * MAX_MODEL_LEN // config.block_size
        geometry = build_geometry(config, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB, num_blocks=num_blocks)
        name = f"step-{os.getpid()}"
        self.region = create_region(name, geometry, "none")
        publish_region(self.region, name)
        self.block_size = config.block_size
        self.state = HostState(self.region)
        self.batch = self.state.array("whole.header", BATCH_HEADER)
        self.output = self.state.array("whole.output", STEP_OUTPUT)
        self.state.array("whole.sampled_tokens", "i4")[:] = 7
        self.pair = QueuePair(ShmLink(self.region, 0))
        self.pair.request_attach()
        while not self.pair.is_attached():
            self.step()
        self.pair.start()

    def close(self) -> None:
        self.region.path.unlink()
        self.region.close()

    def submit(self, prompt: np.ndarray[Any, Any], max_tokens: int) -> None:
        key = self.region.header["hash_key"].tobytes()
        hashes = hash_blocks(prompt, self.block_size, key, hash_root(key))
        self.pair.submit(Submission(prompt, (), 0, hashes), SamplingParams(max_tokens=max_tokens))

    def step(self) -> tuple[int, int]:
        """Run one pass, finish its step at once; return the pass's and end-to-launch nanoseconds (0: no launch)."""
        start = time.perf_counter_ns()
        result = lib.blink_step(self.state.address, CLOCK_NOW)
        passed = time.perf_counter_ns() - start
        if result == StepResult.FAILED:
            raise SystemExit(f"the scheduler failed: error {self.region.control_word('error_code')}")
        if result != StepResult.LAUNCHED:
            return passed, 0
        step = int(self.batch[0]["step"])
        trace = self.region.trace()
        entry = trace[step % len(trace)]
        self.output[0]["done_step"] = step
        return passed, int(entry["launched_ns"]) - int(entry["retired_ns"])


def arrive(stepper: Stepper, script: random.Random) -> None:
    """Submit a request like a chat's: a prompt that starts as many others do, and a short answer."""
    shared = [script.randrange(4)] * 128
    prompt = np.asarray(shared + [script.randrange(VOCAB) for _ in range(script.randint(16, 384))], np.int32)
    try:
        stepper.submit(prompt, script.randint(16, 200))
    except OverloadedError:
        return


def measure(case: Case, num_steps: int) -> dict[str, Any]:
    """Return medians and 99th percentiles in microseconds over `num_steps` launches."""
    stepper, script = Stepper(), random.Random(1)
    renewals = 0

    def between() -> None:
        nonlocal renewals
        stepper.pair.drain()
        renewals += 1
        if renewals % 100 == 0:
            stepper.pair.renew_lease()
        if case.arrivals:
            arrive(stepper, script)

    try:
        return _measure(stepper, case, num_steps, between)
    finally:
        stepper.close()


def _measure(stepper: Stepper, case: Case, num_steps: int, between: Callable[[], None]) -> dict[str, Any]:
    for i in range(case.num_running):
        stepper.submit(np.full(64, i, np.int32), MAX_MODEL_LEN)
    warm = 0
    while warm < 50 or stepper.batch[0]["num_rows"] < case.num_running:
        stepper.step()
        between()
        warm += 1
    samples: list[tuple[int, int]] = []
    while len(samples) < num_steps:
        sample = stepper.step()
        if sample[1]:
            samples.append(sample)
        between()
    passes, launches = (np.asarray(column) / 1000 for column in zip(*samples, strict=True))
    return {
        "case": case.name,
        "steps": num_steps,
        "rows_at_end": int(stepper.batch[0]["num_rows"]),
        "launch_p50_us": float(np.median(launches)),
        "launch_p99_us": float(np.percentile(launches, 99)),
        "pass_p50_us": float(np.median(passes)),
        "pass_p99_us": float(np.percentile(passes, 99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="launches to measure per case")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if not 0 < options.steps <= MAX_MODEL_LEN - 1000:
        parser.error(
            f"--steps must be between 1 and {MAX_MODEL_LEN - 1000}: decoding sequences end at the context's end"
        )
    print(f"{'case':>14} {'end to launch':>22} {'whole pass':>22}   us: median, p99")
    results = [measure(case, options.steps) for case in CASES]
    for r in results:
        launch, whole = (f"{r[f'{kind}_p50_us']:12.1f} {r[f'{kind}_p99_us']:9.1f}" for kind in ("launch", "pass"))
        print(f"{r['case']:>14} {launch} {whole}")
    if options.output:
        machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        options.output.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
