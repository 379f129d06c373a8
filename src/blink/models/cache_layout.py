# SPDX-License-Identifier: Apache-2.0
"""CacheLayout: what a model's layers keep of the sequences that run, and the memory that it takes. Needs no torch.

Layers that keep the same form a group, with one tensor for all of them. What is kept per token lies in blocks, which
the scheduler hands out. Layers with a window have window blocks, which it frees once no query sees them. What is
kept per sequence lies in slots: that of a sequence has the number of its entry in the scheduler's tables of slots.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

CONV_WIDTH = 4  # inputs of the convolution that a recurrent layer begins with
_STATE_BYTES = 4  # of a number of a recurrent state: in fewer bits it would lose what decays slowly


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """A key and a value of each token, in blocks of tokens."""

    kv_heads: int
    head_dim: int
    has_values: bool = True  # False: values are parts of the keys
    window: int = 0  # tokens that a query sees, its own included; 0: all. Older ones need not be kept
    spare_blocks: int = 0  # behind those that the scheduler hands out


@dataclass(frozen=True, slots=True, kw_only=True)
class PerSequence:
    """What a recurrent layer keeps of a sequence, in place of keys and values."""

    state: tuple[int, int, int]  # float32 [value heads, size of a key, size of a value]
    inputs: tuple[int, int]  # of the convolution, in the type of activations: [last ones, channels]
    gates: int  # what else the rule reads of a token
    rollback: int = 0  # the most tokens that may be taken back of those that a step computed

    @property
    def kept(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of a slot's inputs of the convolution and gates, by positions modulo the first size.

        The state takes in the tokens that stay with the next one. So as many tokens as may be taken back are kept
        before that one, as many behind it, and what its convolution reads.
        """
        width, channels = self.inputs
        size = width + 2 * self.rollback
        return (size, channels), (size, self.gates) if self.rollback else (0, 0)

    def count_bytes(self, itemsize: int) -> int:
        """Return the bytes of a layer's slot; itemsize: bytes of a number of activations."""
        return math.prod(self.state) * _STATE_BYTES + sum(map(math.prod, self.kept)) * itemsize


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same of each token."""

    layers: tuple[int, ...]  # their indices
    state: PerToken

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int, int]:
        """Return the shape of the group's tensor; its second dimension is keys, and values where they are kept."""
        state = self.state
        return (len(self.layers), 1 + state.has_values, num_blocks, block_size, state.kv_heads, state.head_dim)


@dataclass(frozen=True, slots=True)
class RecurrentGroup:
    """Layers that keep the same of each sequence."""

    layers: tuple[int, ...]
    state: PerSequence


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of all layers."""

    groups: tuple[CacheGroup, ...]
    recurrent: tuple[RecurrentGroup, ...] = ()

    @classmethod
    def of(cls, states: Sequence[PerToken | None], recurrent: Sequence[PerSequence | None] = ()) -> CacheLayout:
        """Group layers by what each keeps; None: nothing of that kind."""
        groups = tuple(CacheGroup(layers, state) for state, layers in _group(states))
        return cls(groups, tuple(RecurrentGroup(layers, state) for state, layers in _group(recurrent)))

    @property
    def window(self) -> int:
        """The tokens that a query sees at most in the layers with a window; 0: no layer has one."""
        return max((group.state.window for group in self.groups), default=0)

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Return the bytes of a block of tokens over all layers; itemsize: bytes of a number."""
        return sum(self.block_bytes(block_size, itemsize))

    def block_bytes(self, block_size: int, itemsize: int) -> tuple[int, int]:
        """Return the bytes of a block in the layers without a window, and of a window block in the others."""
        sizes = [0, 0]
        for group in self.groups:
            sizes[group.state.window > 0] += math.prod(group.shape(1, block_size)) * itemsize
        return sizes[0], sizes[1]

    def spare_bytes(self, block_size: int, itemsize: int) -> int:
        """Return the bytes of all spare blocks."""
        return sum(math.prod(one.shape(one.state.spare_blocks, block_size)) for one in self.groups) * itemsize

    def bytes_per_sequence(self, itemsize: int) -> int:
        """Return the bytes of a slot over all layers, whatever the sequence's length; see PerSequence.count_bytes()."""
        return sum(len(group.layers) * group.state.count_bytes(itemsize) for group in self.recurrent)


_State = TypeVar("_State", bound=Hashable)


def _group(states: Sequence[_State | None]) -> list[tuple[_State, tuple[int, ...]]]:
    members: dict[_State, list[int]] = {}
    for layer, state in enumerate(states):
        if state is not None:
            members.setdefault(state, []).append(layer)
    return [(state, tuple(layers)) for state, layers in members.items()]
