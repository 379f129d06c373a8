# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of quantized matrices as one rank sees it: its parts of them stay as they are stored."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blink.formats.schemes import Quantization
from blink.models.spec import ModelSpec
from blink.models.weights.checkpoint import Checkpoint
from blink.models.weights.cuts import Cuts
from blink.models.weights.quantized_checkpoint import OUTPUT, MatrixCheckpoint
from blink.models.weights.rank_reader import RankCheckpoint, SharedReads

_ROWS = 16  # that a rank's part of the output layer has a multiple of, or no rank keeps its part quantized


class RankParts:
    """The parts of a checkpoint, which the loaders of all ranks read together."""

    def __init__(self, source: Checkpoint, spec: ModelSpec, size: int) -> None:
        """Part a checkpoint of a whole model among so many ranks; their specs are in `specs`.

        Raises:
            ConfigError: the size does not divide the model.
        """
        self._source, self._spec, self._block = source, spec, _count_block(source, spec)
        self.specs, self._reads = spec.split(size, self._block), SharedReads(size)
        self.fail = self._reads.fail

    def open(self, rank: int, device: torch.device) -> Checkpoint:
        """Return the checkpoint as a rank sees it; device: the rank's."""
        cuts = Cuts(self._spec, self.specs[rank].shard, self._block)
        part = RankCheckpoint(self._source, cuts, self._reads, device)
        return part if self._source.matrices is None else RankMatrices(self._source.matrices, part, cuts)


def _count_block(checkpoint: Checkpoint, spec: ModelSpec) -> int:
    """Return how many columns of a row share a scale, so that ranks cannot part them."""
    if checkpoint.stored_rows is not None:
        return checkpoint.stored_rows.count_block()
    return spec.scaled_columns


class RankMatrices(MatrixCheckpoint):
    """A rank's parts of a checkpoint with quantized matrices."""

    def __init__(self, source: MatrixCheckpoint, part: RankCheckpoint, cuts: Cuts) -> None:
        """part: the same checkpoint's tensors as the rank sees them."""
        self._source, self._part, self._cuts = source, part, cuts
        self.norm_shift, self.keeps_groups = source.norm_shift, source.keeps_groups

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor whose part has that shape, or what it is made of."""
        self._part.check(name, shape)

    def fill(self, name: str, target: Tensor) -> None:
        """Write the rank's part of a tensor, dequantised if it must be."""
        self._part.fill(name, target)

    def find_scheme(self, name: str) -> Quantization | None:
        """Return how a matrix is quantized; None if it is not, or if the last rank's part of it is too odd."""
        if name == OUTPUT and self._cuts.find(name).widen((0, 0))[0] % (_ROWS * self._cuts.shard.size):
            return None
        owned = self._cuts.find_owners(name)
        return self._source.find_scheme(owned[self._cuts.shard.rank] if owned else name)

    def read_matrix(self, name: str, shape: tuple[int, int], device: torch.device) -> Any:
        """Return the rank's part of a matrix in its format; None if it is not quantized."""
        del shape  # of the part
        rows, columns = self._part.find_shape(name)
        if self.find_scheme(name) is None:
            return None

        def read(stored: str) -> Any:
            return self._source.read_matrix(stored, (rows, columns), device)

        return self._part.take_part(name, read, lambda cut, whole: cut.take_matrix(whole)).to(device)

    def read_expert(self, name: str, expert: int, shape: tuple[int, int], device: torch.device) -> Any:
        """Return the rank's part of an expert's matrix [out, in] of a quantized tensor of all, in its format."""
        del shape
        _, columns, rows = self._part.find_shape(name)

        def read(number: int) -> Any:
            return self._source.read_expert(name, number, (rows, columns), device)

        numbers, cut = self._cuts.find_numbers(name, expert), self._cuts.find(name)
        wholes = [self._part.take(functools.partial(read, number)) for number in numbers]
        return cut.take_expert(wholes[self._cuts.shard.rank if len(wholes) > 1 else 0]).to(device)
