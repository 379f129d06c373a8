# SPDX-License-Identifier: Apache-2.0
"""Blocks of the KV cache in host memory: how many there are, and the copies that the scheduler asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from blink.bits import power_of_two
from blink.config import EngineConfig
from blink.engine.cache_size import CacheShape, CacheSize
from blink.engine.state import HostState
from blink.errors import ConfigError
from blink.host.process import read_available_memory
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder
from blink.region.layout import struct_dtype

_COPY = struct_dtype("HostCopy")
_LEAST_COPIES = 256


def host_sizes(config: EngineConfig, shape: CacheShape, size: CacheSize, model: Decoder) -> dict[str, int]:
    """Return the fields of a geometry for blocks in host memory; none where no option asks for them.

    Raises:
        ConfigError: this engine has none, or the memory is not there.
    """
    ranks = config.tensor_parallel_size
    wanted = config.kv_offload.host_bytes(shape.count_bytes(size), ranks)
    if wanted == 0:
        return {}
    _refuse(config, shape, is_pooling=model.spec.pooling is not None)
    block_bytes = shape.block_bytes[0] * ranks  # of which each rank has a part
    count, free = wanted // block_bytes, read_available_memory()
    if model.device.type == "cpu":  # the KV cache is to be there too
        free -= shape.count_bytes(size) * ranks
    if count < 1:
        raise ConfigError(f"--kv-offloading-size: {wanted} bytes hold no block, which takes {block_bytes}")
    if wanted > free:
        raise ConfigError(
            f"--kv-offloading-size: {wanted >> 20} MiB do not fit into {max(free, 0) >> 20} MiB of memory"
        )
    copies = max(_LEAST_COPIES, 4 * shape.max_blocks)
    return {
        "num_host_blocks": count,
        "host_hash_entries": power_of_two(2 * count),
        "host_copies": power_of_two(copies),
    }


def _refuse(config: EngineConfig, shape: CacheShape, *, is_pooling: bool) -> None:
    reason = ""
    if not config.enable_prefix_caching or is_pooling:
        reason = "there is nothing to keep without the prefix cache"
    elif shape.layout.window:
        reason = "models with a sliding window keep no blocks in host memory yet"
    elif shape.layout.recurrent:
        reason = "models with recurrent layers keep no blocks in host memory yet"
    if reason:
        raise ConfigError(f"--kv-offloading-size: {reason}")


class HostBlocks:
    """The memory of the blocks, and what copies them."""

    def __init__(self, model: Decoder, state: HostState, num_blocks: int, block_size: int) -> None:
        """Allocate the blocks."""
        self._cache = model.allocate_kv_cache(num_blocks, block_size)
        self._copies, self._bounds = state.array("host.copies", _COPY), state.array("host.copy_bounds", np.uint32)

    def copy(self, cache: KvCache) -> None:
        """Make the copies of the launch that is about to run, in their order."""
        first, end = self._bounds.tolist()
        if first == end:
            return
        listed = [self._copies[at % len(self._copies)].tolist() for at in range(first, end)]
        for to_host, sources, targets in runs_of(listed):
            for layer, kept in zip(cache, self._cache, strict=True):
                source, target = (layer, kept) if to_host else (kept, layer)
                target.cells[:, targets] = source.cells[:, sources]


def runs_of(copies: Sequence[tuple[int, int, int]]) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
    """Yield the runs of one direction in a list of (block, host block, whether to the host): sources and targets.

    Of copies to one target in a run, the last counts.
    """
    for to_host, run in groupby(copies, key=lambda copy: copy[2]):
        newest = {(host if to_host else block): (block if to_host else host) for block, host, _ in run}
        yield bool(to_host), torch.tensor([*newest.values()]), torch.tensor([*newest])
