# SPDX-License-Identifier: Apache-2.0
"""Blocks of a GPU's KV cache in host memory: each launch of the scheduler begins with the copies that it has listed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blink.engine.device_scheduler import DeviceArrays
from blink.kernels.gpu.host_blocks import copy_listed
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder
from blink.models.weights.token_table import let_gpu_read
from blink.region.layout import struct_dtype

_FIELDS = struct_dtype("HostCopy").itemsize // 4


class _Pair(NamedTuple):
    """The blocks of the layers of a group: int32 [pieces, blocks, words]."""

    cache: Tensor
    host: Tensor


class GpuHostBlocks:
    """The memory of the blocks, and what copies them."""

    def __init__(self, model: Decoder, state: DeviceArrays, cache: KvCache, num_blocks: int, block_size: int) -> None:
        """Allocate blocks, and lock them so that kernels can reach them.

        Raises:
            ConfigError: they cannot be locked.
        """
        self._pairs = list[_Pair]()
        for group in model.spec.cache_layout.groups:
            host = _as_words(torch.zeros(group.shape(num_blocks, block_size), dtype=model.kv_dtype))
            let_gpu_read(host, "lower --kv-offloading-size")  # as long as this view is there
            own = cache[group.layers[0]].view_group(len(group.layers))
            self._pairs.append(_Pair(_as_words(own), host))
        self._copies = state.array("host.copies", torch.int32).view(-1, _FIELDS)
        self._bounds = state.array("host.copy_bounds", torch.int32)

    def enqueue(self) -> None:
        """Enqueue the copies of the launch that is about to run."""
        for pair in self._pairs:
            copy_listed(pair.cache, pair.host, self._copies, self._bounds)


def _as_words(memory: Tensor) -> Tensor:
    """View [layers, parts, blocks, tokens, heads, size] as int32 [pieces, blocks, words]."""
    return memory.flatten(0, 1).flatten(2).view(torch.int32)
