# SPDX-License-Identifier: Apache-2.0
"""The scheduler under sanitizers: real threads as lanes, frontends and model; and a hostile frontend's random bytes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from conftest import Compile

_FUZZ_ENTRIES = 1_000_000


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


def run(program: Path, *arguments: int) -> dict[str, int]:
    """Run a program, which must exit with 0, and return the counts that it prints."""
    done = subprocess.run(
        [str(program), *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return {name: int(value) for name, value in re.findall(r"([a-z]+) (\d+)", done.stdout)}


@pytest.mark.parametrize("lanes", [1, 2, 5])
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_deliver_every_token_without_a_race(compile_native: Compile, sanitizer: str, lanes: int) -> None:
    program = build(compile_native, "threads.cpp", sanitizer)
    counts = run(program, lanes, 3, 60)
    assert counts["mismatches"] == 0
    # The run is worthless unless it went through what it is for.
    assert counts["tokens"] > 400 and counts["evicted"] > 0 and counts["hits"] > 0
    assert counts["preempted"] + counts["parked"] > 0


def test_random_entries_and_words_of_one_frontend_harm_nobody(compile_native: Compile) -> None:
    program = build(compile_native, "fuzz.cpp", "address,undefined", "-O1")
    counts = run(program, _FUZZ_ENTRIES, 1)
    assert counts["sent"] >= _FUZZ_ENTRIES and counts["bad"] > _FUZZ_ENTRIES / 5
    assert counts["ended"] > 1000 and counts["answers"] > 1000 and counts["preempted"] > 0
