# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""The memory through which the GPUs of one process exchange numbers, which each maps of all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cuda.bindings import driver
from torch import Tensor

from blink.errors import ConfigError
from blink.kernels.gpu.launch import check

_HEAD_BYTES = 256  # csrc/kernels/comm/exchange.cuh: kBoxHead
LINE_BYTES, DATA_BYTES = 16, 8  # of a line, and of the data in it
_PARITIES = 2
_ALREADY = driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


class Boxes:
    """A box of each rank on its GPU: the others write lines into it, csrc/kernels/comm/exchange.cuh says how."""

    def __init__(self, devices: Sequence[torch.device], num_bytes: int) -> None:
        """Allocate boxes for exchanges of up to so many bytes of a rank.

        Raises:
            ConfigError: a GPU cannot reach another's memory.
        """
        map_peers(devices)
        self.devices, size = tuple(devices), len(devices)
        self.lines = -(-num_bytes // DATA_BYTES)
        whole = _HEAD_BYTES + _PARITIES * size * self.lines * LINE_BYTES
        self.memory = [torch.zeros(whole, dtype=torch.uint8, device=device) for device in devices]
        places = torch.tensor([memory.data_ptr() for memory in self.memory], dtype=torch.int64)
        self.places = [places.to(device) for device in devices]  # the addresses of all boxes, on each GPU
        for device in devices:
            torch.cuda.synchronize(device)

    def read_lost(self) -> list[int]:
        """Return which rank each rank misses, -1 for none; waits for the GPUs."""
        return [int(memory[:8].view(torch.int32)[1]) - 1 for memory in self.memory]


def map_peers(devices: Sequence[torch.device]) -> None:
    """Let each GPU reach the memory of all others.

    Raises:
        ConfigError: one cannot.
    """
    numbers = [device.index or 0 for device in devices]
    contexts: dict[int, driver.CUcontext] = {}
    for number in numbers:
        Tensor.zero_(torch.empty(1, device=f"cuda:{number}"))  # makes the context
        contexts[number] = check(driver.cuDevicePrimaryCtxRetain(number))
    for number in numbers:
        with torch.cuda.device(number):
            for peer in numbers:
                if peer != number:
                    _map_peer(number, peer, contexts[peer])


def _map_peer(number: int, peer: int, context: driver.CUcontext) -> None:
    if not check(driver.cuDeviceCanAccessPeer(number, peer)):
        raise ConfigError(f"GPU {number} cannot reach the memory of GPU {peer}: `nvidia-smi topo -m` shows the links")
    status = driver.cuCtxEnablePeerAccess(context, 0)
    if status[0] != _ALREADY:
        check(status)
