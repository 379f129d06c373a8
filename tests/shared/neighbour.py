# SPDX-License-Identifier: Apache-2.0
"""An engine with a client to measure, next to a busy neighbour of sound requests and to a frontend that attacks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

import hostile_frontend
from processes import Engine, Frontend, answers, run_engine, start_frontend, stop, wait_for
from tiny_model import write_tiny_model

_PATIENCE = 300.0  # seconds; reached only by failures
_ROUND_SECONDS = 4.0
_PROMPTS = [list(range(start, start + 40)) for start in range(0, 200, 20)]
_MAX_TOKENS = 16
# Sound requests that the attacker has open. What they cost is fairness' affair (test_fairness.py) and not the attack's:
# so the measure is a neighbour that has as many open, beside a process that burns a core as the attacker does.
_TAGS = 2
_BURNER = [sys.executable, "-c", "while True: pass"]


@contextmanager
def run_server(model: list[str], device: str) -> Iterator[tuple[Engine, Frontend]]:
    """Serve a model, given with flags of the engine, with a queue pair for the attacker."""
    sizes = ["--max-num-seqs=32", "--max-model-len=512", "--num-gpu-blocks-override=512", "--num-queue-pairs=3"]
    with run_engine(*model, *sizes, "--max-sequences-per-worker=128", "--stall-timeout=2", device=device) as engine:
        frontend = start_frontend(engine.region, model[0], "--skip-tokenizer-init", wait=False)
        try:
            wait_for(lambda: answers(frontend) == 200, _PATIENCE)
            yield engine, frontend
        finally:
            stop(frontend.process)


def tiny_model(folder: Path) -> list[str]:
    """Write a model that answers alike whoever is beside it; return it with the engine's flags."""
    return [str(write_tiny_model(folder)), "--load-format=dummy", "--dtype=float32"]


def answer(frontend: Frontend, prompt: list[int]) -> list[int]:
    answered = frontend.complete(prompt, max_tokens=_MAX_TOKENS, ignore_eos=True, return_token_ids=True)
    return answered["choices"][0]["token_ids"]


@contextmanager
def _beside(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process that yields its core: the attack is on queues and memory, not on the machine's cores."""
    process = subprocess.Popen(["nice", "-n", "19", *command], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@dataclass
class Latencies:
    """Seconds of the same requests alone, beside a busy neighbour with sound requests, and beside the attacker."""

    alone: list[float] = field(default_factory=list[float])
    shared: list[float] = field(default_factory=list[float])
    attacked: list[float] = field(default_factory=list[float])
    num_sent: int = 0  # entries of the attacker

    @property
    def growth(self) -> float:
        """How many times the 99th percentile grew that requests have beside a busy neighbour with sound ones."""
        alone, shared, attacked = (float(np.percentile(x, 99)) for x in (self.alone, self.shared, self.attacked))
        return attacked / max(alone, shared)

    def __str__(self) -> str:
        each = {"alone": self.alone, "beside sound requests": self.shared, "beside the attacker": self.attacked}
        found = (
            f"{name} {np.median(times) * 1000:.1f} and {np.percentile(times, 99) * 1000:.1f} ms"
            for name, times in each.items()
        )
        return f"p50 and p99 {', '.join(found)} ({len(self.attacked)} requests beside {self.num_sent} entries)"


def attack(engine: Engine, frontend: Frontend, rounds: int, *, is_exact: bool) -> Latencies:
    """Measure the three in turn, so that all see one machine. `is_exact`: no answer may change."""
    program = [sys.executable, str(Path(hostile_frontend.__file__)), engine.region]
    expected = [answer(frontend, prompt) for prompt in _PROMPTS]
    measure = partial(_measure, frontend, expected if is_exact else None)
    found = Latencies()
    for seed in range(rounds):
        found.alone += measure()
        neighbour = [*program, str(seed), str(_TAGS)]
        with _beside(_BURNER), _beside([*neighbour, "sound"]) as sound:
            _wait_until_it_began(sound)
            found.shared += measure()
        with _beside(neighbour) as attacker:
            _wait_until_it_began(attacker)
            found.attacked += measure()
            attacker.kill()
            assert attacker.stdout is not None
            found.num_sent += int(attacker.stdout.read().split("\n")[-2].split()[0])
    print(found)
    assert engine.process.poll() is None
    assert found.num_sent > 4_000 * rounds
    return found


def _wait_until_it_began(neighbour: subprocess.Popen[str]) -> None:
    assert neighbour.stdout is not None
    assert int(neighbour.stdout.readline().split()[1]) > 0, "none of its requests was admitted"


def _measure(frontend: Frontend, expected: list[list[int]] | None) -> list[float]:
    """Ask for some seconds; return how many seconds each answer took."""
    found: list[float] = []
    until = time.monotonic() + _ROUND_SECONDS
    while time.monotonic() < until:
        which = len(found) % len(_PROMPTS)
        started = time.monotonic()
        tokens = answer(frontend, _PROMPTS[which])
        found.append(time.monotonic() - started)
        assert expected is None or tokens == expected[which], "an honest answer changed"
    return found
