# SPDX-License-Identifier: Apache-2.0
"""CacheLayout: what a model's layers keep of the sequences that run, and the memory that it takes. Needs no torch.

Layers that keep the same form a group, with one tensor for all of them. Today all layers have attention, so there is
one group, whose blocks the scheduler hands out. What is kept once per sequence becomes a second kind next to PerToken,
and the scheduler's geometry then names each group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """A key and a value of each token, in blocks of tokens."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same."""

    layers: tuple[int, ...]  # their indices
    state: PerToken

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int, int]:
        """Return the shape of the group's tensor; its second dimension is keys, values."""
        return (len(self.layers), 2, num_blocks, block_size, self.state.kv_heads, self.state.head_dim)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of all layers."""

    groups: tuple[CacheGroup, ...]

    @classmethod
    def of(cls, states: Sequence[PerToken]) -> CacheLayout:
        """Group layers by what each keeps."""
        members: dict[PerToken, list[int]] = {}
        for layer, state in enumerate(states):
            members.setdefault(state, []).append(layer)
        return cls(tuple(CacheGroup(tuple(layers), state) for state, layers in members.items()))

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Return the bytes of a block of tokens over all layers; itemsize: bytes of a number."""
        return sum(math.prod(group.shape(1, block_size)) for group in self.groups) * itemsize
