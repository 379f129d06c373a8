# SPDX-License-Identifier: Apache-2.0
"""Read a checkpoint for several ranks at once: each tensor is read once, and every rank takes its part of it.

Each rank's loader runs on a thread of its own and asks for the same tensors in the same order. The first to ask for one
reads it; it is dropped when all have taken it, so that at most one whole tensor exists.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.base import QuantizedEmbedding
from blink.formats.gguf import GgufRows
from blink.models.weights.checkpoint import Checkpoint, GgufCheckpoint
from blink.models.weights.cuts import Cut, Cuts, Whole

_Read = TypeVar("_Read")


class SharedReads:
    """What the loaders of all ranks read together."""

    def __init__(self, size: int) -> None:
        self._size, self._changed = size, threading.Condition()
        self._count = 0  # tensors that all have taken
        self._taken, self._value, self._is_read = 0, None, False
        self._failure: BaseException | None = None

    def take(self, number: int, read: Callable[[], _Read]) -> _Read:
        """Return the tensor of a number, counted from 0 in the order in which every rank asks; read: reads it.

        Raises:
            ConfigError: it cannot be read, or another rank has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._count == number or self._failure is not None)
            if self._failure is not None:
                raise ConfigError(f"a rank could not load its weights: {self._failure}") from self._failure
            if not self._is_read:
                try:
                    self._value, self._is_read = read(), True
                except BaseException as error:
                    self.fail(error)
                    raise
            value: Any = self._value
            self._taken += 1
            if self._taken == self._size:
                self._value, self._is_read, self._taken = None, False, 0
                self._count += 1
                self._changed.notify_all()
            return value

    def fail(self, error: BaseException) -> None:
        """Let all ranks fail that wait, or ask for more."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


class RankCheckpoint:
    """A checkpoint as one rank sees it: its parts of the tensors."""

    matrices = None
    # These are parts: read_quantized() has them, but for experts on a GPU, which are dequantised.
    stored_rows: GgufCheckpoint | None = None

    def __init__(self, source: Checkpoint, cuts: Cuts, reads: SharedReads, device: torch.device) -> None:
        """See a checkpoint with the cuts of a rank; device: the rank's."""
        self._source, self._cuts, self._rank, self._reads = source, cuts, cuts.shard.rank, reads
        self._device = device
        self._shapes: dict[str, tuple[int, ...]] = {}  # of whole tensors
        self._asked = 0
        self.norm_shift, self.keeps_groups = source.norm_shift, source.keeps_groups

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor whose part has that shape."""
        self._shapes[name] = self._cuts.find(name).widen(shape)
        self._source.check(name, self._shapes[name])

    def find_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor, which check() has found."""
        return self._shapes[name]

    def fill(self, name: str, target: Tensor) -> None:
        """Write the rank's part of a tensor."""
        read = functools.partial(self._read, self.find_shape(name), target)
        part = self.take_part(name, read, lambda cut, whole: cut.take(whole))
        target.copy_(part.reshape(target.shape))

    def take_part(self, name: str, read: Callable[[str], _Read], cut: Callable[[Cut | Whole, _Read], _Read]) -> _Read:
        """Return what a rank has of a tensor, which is read by the name of it or of each rank's own."""
        owned, part = self._cuts.find_owners(name), None
        for owner, stored in enumerate(owned or [name]):
            whole = self.take(functools.partial(read, stored))
            if owner == (self._rank if owned else 0):
                part = cut(self._cuts.find(name), whole)
        assert part is not None
        return part

    def read_quantized(self, names: Sequence[str], order: Sequence[Tensor] | None = None) -> QuantizedEmbedding | None:
        """Return the rank's parts of matrices, one below the other, as stored; None: they have to be filled."""
        source = self._source.stored_rows
        if source is None:
            return None
        owners = [self._cuts.find_owners(name) for name in names]
        lists = [list(each) for each in zip(*owners, strict=True)] if owners[0] else [names]
        found = [self.take(functools.partial(source.read_rows, stored)) for stored in lists]
        rows = found[self._rank if owners[0] else 0]
        if rows is None:
            return None
        cuts = [self._cuts.find(name) for name in names]
        parts = [_cut_rows(part, cut, rows.columns) for part, cut in zip(rows.parts, cuts, strict=True)]
        return source.keep(parts, len(cuts[0].take_range(rows.columns)), order, self._device)

    def _read(self, shape: Sequence[int], like: Tensor, name: str) -> Tensor:
        whole = torch.empty(*shape, dtype=like.dtype, device=like.device)
        self._source.fill(name, whole)
        return whole

    def take(self, read: Callable[[], _Read]) -> _Read:
        """Return what the first rank that asks for it reads for all of them."""
        self._asked += 1
        return self._reads.take(self._asked - 1, read)


def _cut_rows(rows: GgufRows, cut: Cut | Whole, columns: int) -> GgufRows:
    """Return a rank's part of rows as stored; no block of columns is parted, for the spec has been split so."""
    own = cut.take_range(columns)
    if len(own) == columns:
        return GgufRows(rows.format, cut.take(rows.blocks).contiguous())
    start, end = (border * rows.blocks.shape[1] // columns for border in (own.start, own.stop))
    return GgufRows(rows.format, rows.blocks[:, start:end].contiguous())
