# SPDX-License-Identifier: Apache-2.0
"""Reads the energy counter of a GPU through NVML, where there is one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from blink.errors import BlinkError
from blink.host.extras import how_to_install


class EnergyMeter:
    """The energy that one GPU has used since its driver was loaded.

    Raises:
        BlinkError: NVML, the GPU or its counter is not there.
    """

    def __init__(self, index: int) -> None:
        try:
            self._nvml: Any = import_module("pynvml")
        except ImportError as error:
            raise BlinkError(f"nvidia-ml-py is not installed: {how_to_install('bench')}") from error
        try:
            self._nvml.nvmlInit()
            self._gpu = self._nvml.nvmlDeviceGetHandleByIndex(index)
            self.read()
        except self._nvml.NVMLError as error:
            raise BlinkError(f"NVML: {error}") from error

    def read(self) -> float:
        """Return joules."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1e3  # from millijoules
