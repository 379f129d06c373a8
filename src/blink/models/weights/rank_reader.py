# SPDX-License-Identifier: Apache-2.0
"""Read a checkpoint for several ranks at once: each tensor is read once, and every rank takes its part of it.

Each rank's loader runs on a thread of its own and asks for the same tensors in the same order. The first to ask for one
reads it; it is dropped when all have taken it, so that at most one whole tensor exists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.base import QuantizedEmbedding
from blink.formats.gguf import GgufRows
from blink.models.weights.checkpoint import Checkpoint, GgufCheckpoint
from blink.models.weights.cuts import Cut, Cuts, FirstRank

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

    def __init__(self, source: Checkpoint, cuts: Cuts, rank: int, reads: SharedReads) -> None:
        self._source, self._cuts, self._rank, self._reads = source, cuts, rank, reads
        self._shapes: dict[str, tuple[int, ...]] = {}  # of whole tensors
        self._asked = 0
        self.norm_shift, self.keeps_groups = source.norm_shift, source.keeps_groups

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor whose part has that shape."""
        cut = self._cuts.find(name)
        whole = cut.widen(shape) if isinstance(cut, Cut) else tuple(shape)
        self._shapes[name] = whole
        self._source.check(name, whole)

    def fill(self, name: str, target: Tensor) -> None:
        """Write the rank's part of a tensor."""
        shape, cut = self._shapes[name], self._cuts.find(name)
        part: Tensor | None = None
        for owner, stored in enumerate(self._cuts.find_owners(name) or [name]):
            whole = self._take(lambda stored=stored: self._read(stored, shape, target))
            if stored == name or owner == self._rank:
                part = cut.take(whole) if isinstance(cut, Cut) else whole
        assert part is not None
        if isinstance(cut, FirstRank) and self._rank:
            target.zero_()
        else:
            target.copy_(part.view(target.shape))

    def read_quantized(self, names: Sequence[str]) -> QuantizedEmbedding | None:
        """Return the rank's parts of matrices, one below the other, as stored; None: they have to be filled."""
        if not isinstance(self._source, GgufCheckpoint):
            return None
        source, found = self._source, list[GgufRows]()
        owners = [self._cuts.find_owners(name) or [name] for name in names]
        columns = 0
        for rank in range(len(owners[0])):
            stored = [each[rank] for each in owners]
            rows = self._take(lambda stored=stored: source.read_rows(stored))
            if rows is None:
                return None
            if len(owners[0]) == 1 or rank == self._rank:
                columns, found = rows.columns, rows.parts
        cut = self._cuts.find(names[0])
        if isinstance(cut, Cut) and cut.dim == 1:
            found = [_take_columns(one, cut) for one in found]
            columns = len(cut.indices)
        else:
            found = [_take_rows(one, self._cuts.find(name)) for one, name in zip(found, names, strict=True)]
        return source.keep(found, columns)

    def _read(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        whole = torch.empty(*shape, dtype=like.dtype, device=like.device)
        self._source.fill(name, whole)
        return whole

    def _take(self, read: Callable[[], _Read]) -> _Read:
        self._asked += 1
        return self._reads.take(self._asked - 1, read)


def _take_rows(rows: GgufRows, cut: Cut | FirstRank | None) -> GgufRows:
    return GgufRows(rows.format, cut.take(rows.blocks)) if isinstance(cut, Cut) else rows


def _take_columns(rows: GgufRows, cut: Cut) -> GgufRows:
    """Return blocks of consecutive columns; the spec has been split so that no block is parted."""
    per_column = rows.blocks.shape[1] / cut.size
    first, count = int(cut.indices[0]), len(cut.indices)
    start, end = (int(column * per_column) for column in (first, first + count))
    return GgufRows(rows.format, rows.blocks[:, start:end].contiguous())
