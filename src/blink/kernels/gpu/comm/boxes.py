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

_HEAD_BYTES, _FLAG_BYTES = 256, 4  # csrc/kernels/comm/exchange.cuh: kBoxHead, and of a flag
LINE_BYTES, DATA_BYTES = 16, 8  # of a line, and of the data in it or of a piece
UNIT_BYTES = 512 * DATA_BYTES  # that a block of threads has at once of a large exchange
MOST_BLOCKS = 64  # that run at once with all else
_MOST_RANKS = 8
_PARITIES = _PHASES = 2
# Up to how many bytes from all others each rank has them send all (one-shot), in lines; of more, ranks add up parts
# (two-shot). On two H200 1 MB took 11.2 and 15.0 us: benchmarks/kernels/all_reduce.py.
ONE_SHOT_BYTES = 1 << 20
_ALREADY = driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


class Boxes:
    """A box of each rank on its GPU: the others write lines into it, csrc/kernels/comm/exchange.cuh says how."""

    def __init__(self, devices: Sequence[torch.device], num_bytes: int, line_bytes: int = 0) -> None:
        """Allocate boxes for sums of up to so many bytes.

        line_bytes: of the largest exchange in lines, if they are to take others than the smallest ones.

        Raises:
            ConfigError: a GPU cannot reach another's memory.
        """
        assert len(devices) <= _MOST_RANKS
        map_peers(devices)
        self.devices, size = tuple(devices), len(devices)
        self.lines = -(-max(line_bytes, min(num_bytes, choose_one_shot(size))) // DATA_BYTES)
        self.pieces = count_units(num_bytes, size) * UNIT_BYTES // DATA_BYTES
        flags = _PARITIES * _PHASES * _MOST_RANKS * MOST_BLOCKS
        pieces = _PARITIES * _PHASES * size * self.pieces
        lines = _PARITIES * size * self.lines
        whole = _HEAD_BYTES + flags * _FLAG_BYTES + lines * LINE_BYTES + pieces * DATA_BYTES
        self.memory = [torch.zeros(whole, dtype=torch.uint8, device=device) for device in devices]
        places = torch.tensor([memory.data_ptr() for memory in self.memory], dtype=torch.int64)
        self.places = [places.to(device) for device in devices]  # the addresses of all boxes, on each GPU
        for device in devices:
            torch.cuda.synchronize(device)

    def read_lost(self) -> list[int]:
        """Return which rank each rank misses, -1 for none; waits for the GPUs."""
        return [int(memory[:8].view(torch.int32)[1]) - 1 for memory in self.memory]


def choose_one_shot(size: int) -> int:
    """Return up to how many bytes of one rank's sum is exchanged in one shot by so many ranks."""
    return ONE_SHOT_BYTES // max(size - 1, 1)


def count_units(num_bytes: int, size: int) -> int:
    """Return how many units a rank adds up of a sum of so many bytes."""
    return -(-num_bytes // (UNIT_BYTES * size))


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
