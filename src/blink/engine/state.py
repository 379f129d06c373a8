# SPDX-License-Identifier: Apache-2.0
"""The scheduler's own memory on the host, and numpy views of its arrays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from blink.region.layout import STATE
from blink.region.memory import Region
from blink.region.native import lib

if TYPE_CHECKING:
    import torch


def array_places(geometry: np.ndarray[Any, Any]) -> dict[str, tuple[int, int, int]]:
    """Return where each array of a scheduler's state is: offset, bytes of an element, number of elements."""
    return json.loads(lib.blink_state_text(geometry.ctypes.data))


class HostState:
    """Hold the state of a scheduler that runs on this CPU over `region`."""

    def __init__(self, region: Region) -> None:
        geometry = np.ascontiguousarray(region.geometry)
        self._arrays = array_places(geometry)
        memory = np.zeros(lib.blink_state_bytes(geometry.ctypes.data) + 256, np.uint8)
        start = -memory.ctypes.data % 256
        self._bytes = memory[start:]
        self.address: int = self._bytes.ctypes.data
        lib.blink_state_build(self.address, region.address, self.address, region.address)

    @property
    def struct(self) -> np.ndarray[Any, Any]:
        """The State itself (0-dimensional, dtype layout.STATE)."""
        return self._bytes[: STATE.itemsize].view(STATE)[0:1].reshape(())

    def array(self, name: str, dtype: np.dtype[Any] | type[Any] | str) -> np.ndarray[Any, Any]:
        """Return one of the state's arrays, flat, as `dtype` (whose size must divide the element's)."""
        offset, size, count = self._arrays[name]
        return self._bytes[offset : offset + size * count].view(dtype)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one of the state's arrays, flat, as a tensor over the same memory."""
        import torch  # here, so that whoever steps a scheduler without a model needs none

        return torch.from_numpy(self.array(name, np.uint8)).view(dtype)
