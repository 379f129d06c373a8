# SPDX-License-Identifier: Apache-2.0
"""The scheduler under sanitizers: real threads as lanes, frontends and model; and a hostile frontend's random bytes."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from conftest import Compile

pytestmark = pytest.mark.timeout(900)  # threads that wait for each other take minutes where processors are few and busy


def build(compile_native: Compile, source: str, sanitizer: str, *flags: str) -> Path:
    """Compile a test program with a sanitizer; skip where the compiler has none."""
    probe = subprocess.run(
        ["g++", f"-fsanitize={sanitizer}", "-x", "c++", "-", "-o", os.devnull],
        input="int main() {}",
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        pytest.skip(f"the compiler cannot link -fsanitize={sanitizer}")
    return compile_native(source, *flags, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")


def run(program: Path, *arguments: int, timeout: float = 400) -> dict[str, int]:
    """Run a program, which must exit with 0, and return the counts that it prints."""
    done = subprocess.run(
        [str(program), *map(str, arguments)], capture_output=True, text=True, check=False, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return {name: int(value) for name, value in re.findall(r"([a-z]+) (\d+)", done.stdout)}


def check_threads(compile_native: Compile, sanitizer: str, lanes: int, sequences: int) -> None:
    program = build(compile_native, "threads.cpp", sanitizer)
    counts = run(program, lanes, 3, sequences, 3)
    assert counts["mismatches"] == 0
    # The run is worthless unless it went through what it is for.
    assert counts["tokens"] > 11 * sequences and counts["evicted"] > 0 and counts["hits"] > 0
    assert counts["preempted"] + counts["parked"] > 0
    assert counts["launches"] > counts["steps"] * 6 / 5, "many steps are in segments"  # fewer on a busy machine


def test_threads_deliver_every_token_without_a_race(compile_native: Compile) -> None:
    check_threads(compile_native, "thread", lanes=2, sequences=24)


@pytest.mark.long
@pytest.mark.parametrize("lanes", [1, 2, 5])
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_more_threads_deliver_every_token_without_a_race(compile_native: Compile, sanitizer: str, lanes: int) -> None:
    check_threads(compile_native, sanitizer, lanes, sequences=60)


def check_fuzz(program: Path, entries: int, seed: int, timeout: float) -> None:
    counts = run(program, entries, seed, timeout=timeout)
    # The run is worthless unless it went through what it is for.
    assert counts["sent"] >= entries and counts["bad"] > entries / 5
    assert min(counts["ended"], counts["answers"], counts["hits"]) > entries / 200
    assert seed % 2 == 0 or counts["launches"] > counts["steps"] * 11 / 10, "many steps are in segments"
    assert counts["biased"] > entries / 10_000 and counts["preempted"] > 0 and counts["expired"] > 0


def test_random_entries_words_and_arenas_of_one_frontend_harm_nobody(compile_native: Compile) -> None:
    check_fuzz(build(compile_native, "fuzz.cpp", "address,undefined"), 40_000, 9, timeout=400)


def test_what_the_optimizer_may_take_for_granted_holds(compile_native: Compile) -> None:
    """Take two pointers to different types for pointers to different memory, as the library's compiler may."""
    check_fuzz(compile_native("fuzz.cpp", "-O2"), 40_000, 9, timeout=400)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_million_random_entries_of_one_frontend_harm_nobody(compile_native: Compile) -> None:
    """Take about a minute of one core."""
    program = build(compile_native, "fuzz.cpp", "address,undefined", "-O1")
    check_fuzz(program, 10_000_000, int(time.time()), timeout=3000)


def check_automata(program: Path, count: int, seed: int, timeout: float) -> None:
    counts = run(program, count, seed, timeout=timeout)
    assert counts["sound"] > count / 3 and counts["taken"] > count


def test_random_automata_are_refused_or_walked_within_their_memory(compile_native: Compile) -> None:
    check_automata(build(compile_native, "automata.cpp", "address,undefined", "-O1"), 20_000, 1, timeout=400)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_millions_of_random_automata_are_refused_or_walked_within_their_memory(compile_native: Compile) -> None:
    program = build(compile_native, "automata.cpp", "address,undefined", "-O1")
    check_automata(program, 3_000_000, int(time.time()), timeout=3000)
