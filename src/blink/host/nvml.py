# SPDX-License-Identifier: Apache-2.0
"""One GPU as NVIDIA's management library (NVML) shows it. The library comes with the driver; no package is needed."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from blink.errors import BlinkError

_LIBRARY: Final = "libnvidia-ml.so.1"
_SM_CLOCK: Final = 1  # nvmlClockType_t
_NAME_BYTES: Final = 96


def count_gpus() -> int:
    """Return how many GPUs this machine has; 0 without a driver."""
    try:
        library: Any = ctypes.CDLL(_LIBRARY)
    except OSError:
        return 0
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    return count.value


class Gpu:
    """A GPU that counts its energy.

    Raises:
        BlinkError: there is no driver, no such GPU, or it counts none.
    """

    def __init__(self, index: int = 0, *, bus_id: str = "") -> None:
        """Find a GPU by its PCI bus id, or else by its index, as nvidia-smi counts."""
        try:
            self._library: Any = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise BlinkError(f"there is no NVIDIA driver: {error}") from error
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        if bus_id:
            self._call("nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(self._handle))
        else:
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._handle))
        self.read_joules()

    def read_joules(self) -> float:
        """Return the energy that the GPU has used since its driver was loaded.

        Raises:
            BlinkError: the driver does not say.
        """
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def read_sm_mhz(self) -> int:
        """Return the clock of the SMs.

        Raises:
            BlinkError: the driver does not say.
        """
        clock = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._handle, ctypes.c_int(_SM_CLOCK), ctypes.byref(clock))
        return clock.value

    @property
    def name(self) -> str:
        """The product's name."""
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("nvmlDeviceGetName", self._handle, text, ctypes.c_uint(_NAME_BYTES))
        return text.value.decode()

    def _call(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            raise BlinkError(f"NVML: {self._library.nvmlErrorString(status).decode()}")
