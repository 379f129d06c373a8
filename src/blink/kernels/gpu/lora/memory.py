# SPDX-License-Identifier: Apache-2.0
"""Adapters of a GPU, in memory that is taken at boot: one stack of matrices for each weight, an index for each adapter.

Where all that are loaded fit in GPU memory, a thread of the host copies each there once. Else it writes them to
locked memory, and the scheduler has one copied to a slot when a sequence waits for it. Steps read either without the
host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import triton
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.base import Weight
from blink.formats.experts import ExpertWeights
from blink.kernels.batch import Batch
from blink.kernels.gpu.lora import few_tokens
from blink.kernels.gpu.lora.experts import PairUpdates
from blink.kernels.gpu.lora.fused import FusedUpdates
from blink.kernels.gpu.lora.stack import LEAST_RANK, MOST_RANK_TILE, Stack
from blink.kernels.gpu.lora.update import add_update, mark_tokens
from blink.kernels.gpu.moe.routing import Routes
from blink.kernels.lora import Finish, Updates, WeightParts
from blink.plan.site import Bucket

_LEAST_TILE, _MOST_TILE = 16, 256
Upload = Callable[[Tensor, Tensor], None]  # copies to GPU memory, from the host's; blocks until it is there


class GpuAdapters:
    """Holds them, and finds the updates of steps that were captured for adapters."""

    def __init__(
        self,
        weights: Mapping[int, WeightParts],
        num_adapters: int,
        num_slots: int,
        max_rank: int,
        like: Tensor,
        upload: Upload | None = None,
    ) -> None:
        """Take the memory, all zeros. weights: by identity; like: a tensor of the model's type and device.

        upload: copies adapters of which each has a slot of its own; None: the scheduler orders copies.

        Raises:
            ConfigError: the matrices of a weight lie too close together.
        """
        rank = pad_rank(max_rank)
        self._layout = {key: _Layout(parts, rank) for key, parts in weights.items()}
        size = count_numbers(weights, max_rank)
        assert upload is None or num_adapters <= num_slots
        self._upload, num_held = upload, num_adapters if upload is None else 1
        self._held = torch.zeros(num_held, size, dtype=like.dtype, pin_memory=like.device.type == "cuda")
        self._own_slots = torch.arange(1, num_slots + 1, dtype=torch.int32, device=like.device)
        self._slots = torch.zeros(num_slots, size, dtype=like.dtype, device=like.device)
        self.stacks: dict[int, Stack] = {}  # by the weights' identities
        start = 0
        for key, layout in self._layout.items():
            self.stacks[key] = layout.view(self._slots, start)
            start += layout.size

    @property
    def is_paged(self) -> bool:
        """Whether the scheduler orders copies to slots."""
        return self._upload is None

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        return self._slots.nbytes

    def put(self, index: int, updates: Updates) -> None:
        """Write an adapter to GPU memory, or where copies to it read it; blocks until it is there."""
        held, start = self._held[index if self.is_paged else 0], 0
        held.zero_()
        for key, layout in self._layout.items():
            stack = layout.view(held[None], start)
            for update in updates.get(key, ()):
                rank, first = update.down.shape[-2], layout.part_of(update.rows) * layout.rank
                stack.down[0, ..., first : first + rank, :] = update.down
                stack.up[0, ..., update.rows, :rank] = update.up
            start += layout.size
        if self._upload is not None:
            self._upload(self._slots[index], held)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Where copies read the adapters that are loaded, and where they write: [adapters or slots, elements]."""
        return self._held, self._slots

    def clear(self, index: int) -> None:
        """Do nothing: the next adapter is written over this one."""

    def find(self, batch: Batch, bucket: Bucket) -> GpuUpdates | None:
        """Return the updates of a step's tokens; None where the step is captured without adapters."""
        if not bucket.adapters:
            return None
        places = self._own_slots if self.is_paged else batch.adapter_places
        return GpuUpdates(self.stacks, mark_tokens(batch, places, bucket.tokens, bucket.rows))


class GpuUpdates:
    """The updates of a step's tokens."""

    def __init__(self, stacks: Mapping[int, Stack], places: Tensor) -> None:
        """Take the stacks of weights by identity, and each token's place in them, as mark_tokens() returns it."""
        self._stacks, self._places = stacks, places
        self._adapters = few_tokens.list_adapters(places) if len(places) <= few_tokens.MOST_TOKENS else None

    def fuse(self) -> FusedUpdates:
        """Return the same for GEMMs that add updates to their own sums, of a step for which these do not refuse."""
        assert self._adapters is not None
        return FusedUpdates(self._stacks, self._places, self._adapters)

    def begin(self, x: Tensor, weight: Weight, *, early: bool = False) -> Finish:
        """Do what StepUpdates.begin() says."""
        stack = self._stacks.get(id(weight))
        if stack is None:
            return _finish_nothing
        if self._adapters is None:
            return partial(self._add_many, x, stack, early)
        found = few_tokens.shrink(x, stack, self._places, self._adapters, early=early)
        return partial(self._finish_few, found, stack, early)

    def _add_many(self, x: Tensor, stack: Stack, early: bool, result: Tensor, factors: Tensor | None) -> Tensor:
        add_update(result, x, stack, self._places, factors, early=early)
        return result

    def _finish_few(self, found: Tensor, stack: Stack, early: bool, result: Tensor, factors: Tensor | None) -> Tensor:
        assert self._adapters is not None
        few_tokens.expand(result, found, stack, self._places, self._adapters, factors, early=early)
        return result

    def of_pairs(self, weights: Sequence[ExpertWeights], routes: Routes, top_k: int) -> PairUpdates | None:
        """Do what RoutedUpdates.of_pairs() of gpu/moe/grouped.py says."""
        stacks = {id(weight): self._stacks[id(weight)] for weight in weights if id(weight) in self._stacks}
        return PairUpdates(stacks, self._places, routes, top_k) if stacks else None

    def add(
        self, result: Tensor, x: Tensor, weight: Weight, factors: Tensor | None = None, *, early: bool = False
    ) -> Tensor:
        """Do what StepUpdates.add() says."""
        return self.begin(x, weight, early=early)(result, factors)


def _finish_nothing(result: Tensor, factors: Tensor | None) -> Tensor:  # noqa: ARG001
    return result


def count_numbers(weights: Mapping[int, WeightParts], max_rank: int) -> int:
    """Return how many numbers an adapter has in memory.

    Raises:
        ConfigError: the matrices of a weight lie too close together.
    """
    return sum(_Layout(parts, pad_rank(max_rank)).size for parts in weights.values())


def pad_rank(rank: int) -> int:
    """Return the rank that kernels compute for one."""
    padded = max(triton.next_power_of_2(rank), LEAST_RANK)
    return padded if padded <= MOST_RANK_TILE else -(-rank // MOST_RANK_TILE) * MOST_RANK_TILE


class _Layout:
    """Where the matrices of one weight lie in the memory of an adapter: all of A, then B."""

    def __init__(self, parts: WeightParts, rank: int) -> None:
        self._shape, self._rows, self._experts, self.rank = parts.shape, parts.rows, parts.experts, rank
        out, size = parts.shape
        self.tile = math.gcd(_MOST_TILE, out, *(rows.start for rows in parts.rows))
        if self.tile < _LEAST_TILE:
            raise ConfigError("--enable-lora: a GPU takes no adapters of this model: its matrices are too narrow")
        self.size = rank * (len(parts.rows) * size + out) * max(parts.experts, 1)

    def part_of(self, rows: slice) -> int:
        return self._rows.index(rows)

    def view(self, memory: Tensor, start: int) -> Stack:
        """Return the matrices of all adapters in memory [adapters, elements], from an element on."""
        (out, size), count = self._shape, len(self._rows)
        experts = (self._experts,) if self._experts else ()
        middle = start + count * self.rank * size * max(self._experts, 1)
        down = memory[:, start:middle].unflatten(1, (*experts, count * self.rank, size))
        up = memory[:, middle : start + self.size].unflatten(1, (*experts, out, self.rank))
        parts = torch.zeros(out // self.tile, dtype=torch.int32)
        for part, rows in enumerate(self._rows):
            parts[rows.start // self.tile :] = part
        return Stack(down, up, parts.to(memory.device), count, self.tile)
