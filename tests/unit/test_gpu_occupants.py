# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_occupants.py: what occupies a GPU is measured while it works, or ends the program."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import pytest
from gauge import Gauge
from gpu_occupants import Occupant, measure_occupant


class _Gauge:
    """Takes the time that it is to measure, and has no GPU."""

    def measure(self, seconds: float) -> dict[str, float]:
        time.sleep(seconds)
        return {"watts": 500.0, "sm_mhz": 1980.0}


def work(ready: Callable[[], None], seconds: float) -> float:
    """Stand for what works on a GPU: ten passes."""
    begun = time.monotonic()
    ready()
    time.sleep(seconds)
    return (time.monotonic() - begun) / 10


def fail(ready: Callable[[], None], seconds: float) -> float:  # noqa: ARG001
    """Stand for what cannot start."""
    raise MemoryError(seconds)


def test_what_occupies_a_gpu_is_measured_while_it_works() -> None:
    found = measure_occupant(cast("Gauge", _Gauge()), Occupant("work", work), seconds=0.2, settle=0.1)
    assert (found["watts"], found["sm_mhz"]) == (500.0, 1980.0)
    assert 0.13 <= found["pass_seconds"] < 1  # it works for a second longer than it is measured, of ten passes


def test_an_occupant_that_does_not_start_ends_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="work failed"):
        measure_occupant(cast("Gauge", _Gauge()), Occupant("work", fail), seconds=0.2, settle=0.1)
    assert "MemoryError" in capfd.readouterr().err
