# SPDX-License-Identifier: Apache-2.0
"""Time from the end of a step to the launch of the next, by what happened between them.

The client drives a queue pair directly; times are those of the scheduler's trace ring. First some sequences decode
alone, then requests arrive at random (Poisson, lengths about lognormal): steps that only go on, steps at whose
border sequences ended, and steps that prompts join.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from dummy_engine import run_engine

from blink.config import ModelConfig
from blink.link.client import EngineClient
from blink.region.layout import CqeKind
from blink.region.memory import open_region
from blink.sampling_params import SamplingParams

_LOOK_SECONDS = 0.2  # between copies of the trace ring, whose 4,096 entries are steps of 50 us at least


class Watch:
    """Drive a client and collect the trace of its engine."""

    def __init__(self, client: EngineClient, region: str, options: argparse.Namespace) -> None:
        assert client.info is not None
        self._client, self._vocab_size = client, client.info.vocab_size
        self._region = open_region(region)
        self._chance = np.random.default_rng(options.seed)
        self._next_look = self._next_tick = 0.0
        self._parts: list[np.ndarray] = []
        self.num_open = 0

    def submit(self, prompt_tokens: int, new_tokens: int) -> int:
        """Submit a random prompt; its answer ends with its last token."""
        prompt = self._chance.integers(0, self._vocab_size, prompt_tokens).astype(np.int32)
        self.num_open += 1
        return self._client.submit(
            prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0.0), seed=0
        )

    def advance(self) -> int:
        """Take what has arrived; return how many of it are tokens."""
        if time.monotonic() > self._next_tick:
            self._next_tick = time.monotonic() + 0.25
            if lost := self._client.tick():
                raise SystemExit(lost)
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._parts.append(self._region.trace().copy())
        found = self._client.drain()
        self.num_open -= int(np.count_nonzero(found["finish_reason"]))
        return int(np.count_nonzero(found["kind"] == CqeKind.TOKEN))

    def finish(self) -> np.ndarray:
        """Wait for all answers; return the launches since the last call, in order."""
        while self.num_open:
            self.advance()
        self._parts.append(self._region.trace().copy())
        trace = np.unique(np.concatenate(self._parts))
        self._parts.clear()
        return trace[trace["ended_ns"] > 0]


def run_rows(watch: Watch, rows: int, options: argparse.Namespace) -> np.ndarray:
    """Let so many sequences decode side by side; return their launches."""
    watch.finish()
    for _ in range(rows):
        watch.submit(options.prompt_tokens, options.new_tokens)
    trace = watch.finish()
    return trace[-options.new_tokens - rows :]


def run_load(watch: Watch, options: argparse.Namespace) -> np.ndarray:
    """Send requests at random times; return their launches."""
    watch.finish()
    chance = np.random.default_rng(options.seed)
    due = time.monotonic()
    end = due + options.seconds
    while due < end:
        while time.monotonic() < due:
            watch.advance()
        lengths = np.clip(chance.lognormal((4.7, 4.9), (1.0, 0.9)), (4, 2), (1024, 1024)).astype(int)
        watch.submit(int(lengths[0]), int(lengths[1]))
        due += float(chance.exponential(1 / options.rate))
    return watch.finish()


def kinds_of(trace: np.ndarray) -> dict[str, np.ndarray]:
    """Return which launches follow another at once, by what happened between the two."""
    follows = np.zeros(len(trace), bool)
    follows[1:] = (np.diff(trace["step"].astype(np.int64)) == 1) & (trace["idle_before"][1:] == 0)
    decodes = trace["num_tokens"] == trace["num_decode_rows"]
    before = np.roll(trace, 1)
    goes_on = follows & decodes & np.roll(decodes, 1) & (trace["num_rows"] == before["num_rows"])
    joins = follows & (trace["num_admitted"] > 0)
    ends = follows & decodes & np.roll(decodes, 1) & (trace["num_rows"] < before["num_rows"])
    return {
        "decoding goes on": goes_on,
        "sequences ended": ends,
        "one prompt joins": joins & (trace["num_admitted"] == 1),
        "more prompts join": joins & (trace["num_admitted"] > 1),
        "behind prompts": follows & decodes & ~np.roll(decodes, 1),
    }


def report(name: str, trace: np.ndarray) -> None:
    """Print the times of each kind: end to launch, and launch to launch."""
    launched, retired = (trace[field].astype(np.int64) for field in ("launched_ns", "retired_ns"))
    gaps, periods = (launched - retired) / 1e3, np.diff(launched, append=launched[-1:]) / 1e3
    for kind, chosen in kinds_of(trace).items():
        if (count := int(chosen.sum())) < 5:
            continue
        p50, p90, p99 = np.percentile(gaps[chosen], [50, 90, 99])
        step = np.median(periods[chosen])
        print(f"{name:>12}  {kind:<18}{count:>7}{p50:>8.1f}{p90:>8.1f}{p99:>8.1f}{step:>11.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory with a config.json; weights are random")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=48.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of that load")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--num-blocks", type=int, default=0, help="KV cache blocks; 0: as many as there is memory for")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    model = ModelConfig(model=str(options.model), load_format="dummy", max_model_len=options.max_model_len)
    with run_engine(model, device=options.device, num_blocks=options.num_blocks) as (client, region):
        watch = Watch(client, region, options)
        run_rows(watch, 1, options)
        print(f"{'':>12}  {'between the steps':<18}{'n':>7}{'p50':>8}{'p90':>8}{'p99':>8}{'period us':>11}")
        for rows in options.rows:
            report(f"{rows} rows", run_rows(watch, rows, options))
        if options.seconds > 0:
            report(f"{options.rate:g} req/s", run_load(watch, options))


if __name__ == "__main__":
    main()
