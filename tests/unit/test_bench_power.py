# SPDX-License-Identifier: Apache-2.0
"""Energy in joules from a driver of the test, and a clear reason where none can be read."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from blink.bench.power import EnergyMeter
from blink.errors import BlinkError


class _NvmlError(Exception):
    pass


def _driver(patch: pytest.MonkeyPatch, **functions: Any) -> None:
    defaults: dict[str, Any] = {
        "NVMLError": _NvmlError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: f"gpu {index}",
        "nvmlDeviceGetTotalEnergyConsumption": {"gpu 2": 123456}.__getitem__,
    }
    patch.setitem(sys.modules, "pynvml", SimpleNamespace(**defaults | functions))


def _fail(*_: object) -> None:
    raise _NvmlError("Not Supported")


def test_energy_of_the_gpu_asked_for_is_in_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    _driver(monkeypatch)
    assert EnergyMeter(2).read() == pytest.approx(123.456)


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTotalEnergyConsumption"])
def test_driver_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    _driver(monkeypatch, **{function: _fail})
    with pytest.raises(BlinkError, match="Not Supported"):
        EnergyMeter(0)


def test_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(BlinkError, match="nvidia-ml-py is not installed"):
        EnergyMeter(0)
