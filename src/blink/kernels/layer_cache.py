# SPDX-License-Identifier: Apache-2.0
"""What one layer keeps of the sequences that run, by names: keys and values, or recurrent states."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of a layer, in blocks of tokens; or keys of which values are a part."""

    __slots__ = (
        "block_size", "cells", "device", "dtype", "head_dim", "keys", "kv_heads", "num_blocks", "values",
        "values_offset",
    )  # fmt: skip

    def __init__(self, cells: Tensor) -> None:
        """Name the parts of cells [2 or 1, num_blocks, block_size, kv_heads, head_dim]: keys, perhaps values."""
        self.cells = cells
        self.keys, self.values = cells[0], cells[-1]
        _, self.num_blocks, self.block_size, self.kv_heads, self.head_dim = cells.shape
        self.values_offset = cells.stride(0)  # how many numbers behind a key its value lies
        self.dtype, self.device = cells.dtype, cells.device

    def view_group(self, num_layers: int) -> Tensor:
        """Return the cells of all layers of a group, of which this is the first: [num_layers, ...], one memory."""
        cells = self.cells
        assert cells.storage_offset() == 0
        return cells.as_strided((num_layers, *cells.shape), (cells.numel(), *cells.stride()))


def allocate_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. A CPU's take a page of memory once something is written there.

    Zeros, because attention multiplies what it masks by 0, and uninitialised memory may hold NaN.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class StateCache:
    """The slots of a recurrent layer."""

    __slots__ = ("gates", "inputs", "states")

    def __init__(self, states: Tensor, inputs: Tensor, gates: Tensor | None = None) -> None:
        """Take states, float32 [slots, value heads, size of a key, size of a value], and what is kept of last tokens.

        inputs: of the convolution, [slots, size, channels], of which that of position p lies at p % size. gates: the
        same of what else the rule reads, empty where no token is ever taken back.
        """
        self.states, self.inputs = states, inputs
        self.gates = inputs[..., :0, :0] if gates is None else gates

    @property
    def num_kept(self) -> int:
        """How many last tokens a slot keeps inputs of, where these are the slots of one layer."""
        return self.inputs.shape[1]

    def layers(self) -> Iterator[StateCache]:
        """Yield each layer's slots, where these are those of several layers."""
        yield from map(StateCache, self.states, self.inputs, self.gates)


class Snapshots(NamedTuple):
    """The slots that hold snapshots of states, for the prefix cache: the last ones."""

    groups: tuple[StateCache, ...]  # of layers that keep the same, each tensor [layers, slots, ...], contiguous
    first: int  # the slot of the first snapshot


class KvCache:
    """What all layers keep, by their indices: keys and values, or states."""

    __slots__ = ("__weakref__", "_layers", "_sources", "recurrent", "snapshots")

    def __init__(
        self,
        layers: Mapping[int, LayerCache],
        recurrent: Mapping[int, StateCache] | None = None,
        snapshots: Snapshots | None = None,
        sources: Mapping[int, int] | None = None,
    ) -> None:
        """sources: of layers that read what another keeps, which."""
        self._layers = dict(sorted(layers.items()))
        self.recurrent = dict(recurrent or {})
        self.snapshots = snapshots
        self._sources = sources or {}

    def __getitem__(self, layer: int) -> LayerCache:
        return self._layers[self._sources.get(layer, layer)]

    def __iter__(self) -> Iterator[LayerCache]:
        """Yield keys and values of each layer that has them."""
        return iter(self._layers.values())

    @property
    def first(self) -> LayerCache:
        """Keys and values of the first layer that has them."""
        return next(iter(self))
