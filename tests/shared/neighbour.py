# SPDX-License-Identifier: Apache-2.0
"""An engine with a client to measure, a process that burns a core and a frontend that attacks, in turn."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import hostile_frontend
from processes import Engine, Frontend, answers, run_engine, start_frontend, stop, wait_for
from tiny_model import write_tiny_model

_PATIENCE = 120.0  # seconds; reached only by failures
_ROUNDS = 5
_ROUND_SECONDS = 4.0
_PROMPTS = [list(range(start, start + 40)) for start in range(0, 200, 20)]
_MAX_TOKENS = 16
# Sound requests that the attacker has open: what those cost is fairness' affair (test_fairness.py), not the attack's.
_TAGS = 2
_BURNER = [sys.executable, "-c", "while True: pass"]


@contextmanager
def run_server(folder: Path, device: str) -> Iterator[tuple[Engine, Frontend]]:
    """Serve a tiny model, with a queue pair for the attacker."""
    model = [str(write_tiny_model(folder)), "--load-format=dummy", "--dtype=float32"]
    sizes = ["--max-num-seqs=32", "--max-model-len=512", "--num-gpu-blocks-override=512", "--num-queue-pairs=3"]
    with run_engine(*model, *sizes, "--max-sequences-per-worker=128", "--stall-timeout=2", device=device) as engine:
        frontend = start_frontend(engine.region, model[0], "--skip-tokenizer-init", wait=False)
        try:
            wait_for(lambda: answers(frontend) == 200, _PATIENCE)
            yield engine, frontend
        finally:
            stop(frontend.process)


def answer(frontend: Frontend, prompt: list[int]) -> list[int]:
    answered = frontend.complete(prompt, max_tokens=_MAX_TOKENS, ignore_eos=True, return_token_ids=True)
    return answered["choices"][0]["token_ids"]


@contextmanager
def beside(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process that yields its core: the attack is on queues and memory, not on the machine's cores."""
    process = subprocess.Popen(["nice", "-n", "19", *command], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def measure(frontend: Frontend, expected: list[list[int]]) -> list[float]:
    """Ask for some seconds, compare each answer; return how many seconds each took."""
    found: list[float] = []
    until = time.monotonic() + _ROUND_SECONDS
    while time.monotonic() < until:
        which = len(found) % len(_PROMPTS)
        started = time.monotonic()
        assert answer(frontend, _PROMPTS[which]) == expected[which], "an honest answer changed"
        found.append(time.monotonic() - started)
    return found


def check_neighbour(engine: Engine, frontend: Frontend) -> None:
    """Check that the attacker changes no answer and doubles the 99th percentile at most.

    Alone, beside a process that only burns a core, and beside the attacker, in turn, so that all see one machine.
    """
    attack = [sys.executable, str(Path(hostile_frontend.__file__)), engine.region]
    expected = [answer(frontend, prompt) for prompt in _PROMPTS]
    alone, burned, attacked, sent = list[float](), list[float](), list[float](), 0
    for seed in range(_ROUNDS):
        alone += measure(frontend, expected)
        with beside(_BURNER):
            burned += measure(frontend, expected)
        with beside([*attack, str(seed), str(_TAGS)]) as attacker:
            assert attacker.stdout is not None
            attacker.stdout.readline()  # it has begun
            attacked += measure(frontend, expected)
            attacker.kill()
            sent += int(attacker.stdout.read().split("\n")[-2].split()[0])
    quiet, control, found = (float(np.percentile(times, 99)) * 1000 for times in (alone, burned, attacked))
    medians = [round(float(np.median(times)) * 1000, 1) for times in (alone, burned, attacked)]
    print(
        f"p99 alone {quiet:.1f} ms, beside a busy process {control:.1f} ms, beside the attacker {found:.1f} ms "
        f"(medians {medians}; {len(attacked)} requests beside {sent} entries)"
    )
    assert engine.process.poll() is None
    assert sent > 20_000
    assert found <= 2 * max(quiet, control)
