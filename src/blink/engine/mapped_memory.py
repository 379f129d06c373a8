# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""GPU memory that can be taken away and given back at the same addresses, which captured graphs read."""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from blink.kernels.gpu.launch import check


class MappedMemory:
    """A range of a GPU's addresses that is backed by memory while it is mapped."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Reserve at least so many bytes, and map them.

        Raises:
            ConfigError: there is no memory.
        """
        place = driver.CUmemLocation()
        place.type, place.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device.index or 0
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = place
        self._access = driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(check(driver.cuMemGetAllocationGranularity(self._properties, least)))
        self._size = -(-num_bytes // step) * step
        self._device, self._is_mapped = device, False
        self._address = check(driver.cuMemAddressReserve(self._size, 0, driver.CUdeviceptr(0), 0))
        self.map()

    def __del__(self) -> None:
        """Free memory and range, which no tensor views any more."""
        if self._is_mapped:
            self.unmap()
            check(driver.cuMemAddressFree(self._address, self._size))

    def map(self) -> None:
        """Back the range with memory, whose bytes are undefined.

        Raises:
            ConfigError: there is none.
        """
        handle = check(driver.cuMemCreate(self._size, self._properties, 0))
        check(driver.cuMemMap(self._address, self._size, 0, handle, 0))
        check(driver.cuMemRelease(handle))  # it is freed when it is unmapped
        self._is_mapped = True
        check(driver.cuMemSetAccess(self._address, self._size, [self._access], 1))

    def unmap(self) -> None:
        """Free the memory; nothing may read the range then."""
        self._is_mapped = False
        check(driver.cuMemUnmap(self._address, self._size))

    def view(self) -> Tensor:
        """Return the range as uint8 [size]."""
        return torch.as_tensor(self, device=self._device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (int(self._address), False), "version": 3}
