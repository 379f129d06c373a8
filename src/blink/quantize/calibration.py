# SPDX-License-Identifier: Apache-2.0
"""Round a model's matrices in one pass of the plain decoder over a text: each when its first inputs reach it.

So each is rounded for what the matrices before it, rounded already, make of the text, and is read, in 32 bits, only
while it is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.base import QuantizedEmbedding
from blink.formats.matrix import QuantizedMatrix
from blink.kernels.batch import Batch, Header
from blink.kernels.layer_cache import KvCache, LayerCache, StateCache
from blink.models.decoder import Decoder
from blink.models.weights.checkpoint import Checkpoint, GgufCheckpoint
from blink.models.weights.quantized_checkpoint import OUTPUT, is_matrix
from blink.quantize.rounding import Grid, round_matrix, round_nearest
from blink.runner.run import Runner

_BLOCK_SIZE = 16
# How often the first token of a text counts: all others attend to it, and its activations are like no other's.
_FIRST_COUNTS = 100

Keep = Callable[[str, QuantizedMatrix], None]  # takes a matrix by its name


class CalibratedCheckpoint:
    """A checkpoint whose matrices are rounded when they are first multiplied with; `shapes`: of all tensors."""

    stored_rows: GgufCheckpoint | None = None
    matrices = None

    def __init__(self, source: Checkpoint, choose: Callable[[str], Grid], keep: Keep, windows: Tensor) -> None:
        """Take what is rounded, to which grid, who takes it, and the texts [windows, tokens] that will be fed."""
        self._source = source
        self._num_tokens, self._window = windows.numel(), windows.shape[1]
        self._choose = choose
        self._keep = keep
        self.norm_shift, self.keeps_groups = source.norm_shift, source.keeps_groups
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.waiting: dict[str, None] = {}  # matrices that are not rounded yet

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor of that name and shape."""
        self._source.check(name, shape)
        self.shapes[name] = tuple(shape)

    def fill(self, name: str, target: Tensor) -> None:
        """Write a tensor."""
        self._source.fill(name, target)

    def read_quantized(self, names: Sequence[str], order: Sequence[Tensor] | None = None) -> QuantizedEmbedding | None:
        """Return matrices that will be rounded; None for what stays as it is."""
        if not all(map(takes_rounding, names)):
            return None
        assert order is None  # families whose rows are moved are not tuned
        self.waiting.update(dict.fromkeys(names))
        return RoundedWeight(self, names)

    def shape_of(self, names: Sequence[str]) -> tuple[int, int]:
        """Return the shape of matrices, one below the other."""
        return sum(self._heights(names)), self.shapes[names[0]][1]

    def read(self, names: Sequence[str]) -> Tensor:
        """Return matrices, one below the other, as they are in the source."""
        weight = torch.empty(self.shape_of(names))
        for name, part in zip(names, weight.split(self._heights(names)), strict=True):
            self._source.fill(name, part)
        return weight

    def round(self, names: Sequence[str], x: Tensor | None) -> Tensor:
        """Round matrices, one below the other, for inputs [tokens, in], and return what they have become."""
        hessian = None if x is None else self._sum(x)
        return torch.cat([self._round_alike(list(some), grid, hessian) for grid, some in groupby(names, self._choose)])

    def _round_alike(self, names: Sequence[str], grid: Grid, hessian: Tensor | None) -> Tensor:
        weight = self.read(names)
        found = round_nearest(weight, grid) if hessian is None else round_matrix(weight, hessian, grid)
        for name, rows in zip(names, _split_rows(found, self._heights(names)), strict=True):
            self._keep(name, rows)
            del self.waiting[name]
        return found.dequantize(torch.float32)

    def round_rest(self) -> None:
        """Round what no token has reached: experts that none was sent to."""
        for name in list(self.waiting):
            self.round([name], None)

    def _sum(self, x: Tensor) -> Tensor:
        """Return x.T @ x with the texts' first tokens counted more often; x: [tokens, in], of experts some of them."""
        hessian = x.T @ x
        if len(x) == self._num_tokens:
            first = x[:: self._window]
            hessian.addmm_(first.T, first, alpha=_FIRST_COUNTS - 1)
        return hessian

    def _heights(self, names: Sequence[str]) -> list[int]:
        return [self.shapes[name][0] for name in names]


class RoundedWeight(QuantizedEmbedding):
    """Matrices that are rounded for what they are first multiplied with, which is to be all of the text."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, checkpoint: CalibratedCheckpoint, names: Sequence[str]) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self.shape = checkpoint.shape_of(names)

    @property
    def nbytes(self) -> int:
        """None: it is read when it is needed."""
        return 0

    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T with the weight as it has been rounded for x."""
        return functional.linear(x, self._checkpoint.round(self._names, x))

    def dequantize(self) -> Tensor:
        """Return the weight as it is before."""
        return self._checkpoint.read(self._names)

    def take_rows(self, rows: Tensor) -> Tensor:
        """Return some rows of that."""
        return self.dequantize()[rows]


@torch.inference_mode()
def feed(decoder: Decoder, windows: Tensor) -> Tensor:
    """Run texts of one length [windows, tokens] through a decoder as one batch; they begin at position 0.

    Return what the output layer would read of all tokens [windows * tokens, hidden].
    """
    count, length = windows.shape
    num_blocks = -(-length // _BLOCK_SIZE)
    batch = Batch.allocate(
        max_tokens=windows.numel(),
        max_rows=count,
        num_slots=count,
        max_blocks=num_blocks,
        max_model_len=length,
        device=decoder.device,
    )
    places, rows = torch.arange(length), torch.arange(count)
    batch.input_ids.copy_(windows.flatten())
    batch.positions.copy_(places.repeat(count))
    batch.kv_slots.copy_((rows[:, None] * num_blocks * _BLOCK_SIZE + places).flatten())
    batch.query_starts.copy_(torch.arange(count + 1) * length)
    batch.context_lens.fill_(length)
    batch.row_slots.copy_(rows)
    batch.block_tables.copy_(torch.arange(count * num_blocks).view(count, num_blocks))
    batch.header[Header.NUM_ROWS], batch.header[Header.NUM_TOKENS] = count, windows.numel()
    # One layer's cache, which each layer of a group overwrites: nothing is decoded.
    layout = decoder.spec.cache_layout
    caches: dict[int, LayerCache] = {}
    for group in layout.groups:
        shape = group.shape(count * num_blocks, _BLOCK_SIZE)[1:]
        caches |= dict.fromkeys(group.layers, LayerCache(torch.zeros(shape)))
    states: dict[int, StateCache] = {}
    for group in layout.recurrent:
        parts = (torch.zeros(count, *shape) for shape in (group.state.state, group.state.inputs))
        states |= dict.fromkeys(group.layers, StateCache(*parts))
    kv_cache = KvCache(caches, states)
    return Runner(decoder).compute_hidden(batch, kv_cache, windows.numel(), count)


def takes_rounding(name: str) -> bool:
    """Tell whether a tensor is one of the matrices that are rounded while texts run: not the output layer."""
    return is_matrix(name) and name != OUTPUT


def _split_rows(matrix: QuantizedMatrix, rows: list[int]) -> list[QuantizedMatrix]:
    zeros = [None] * len(rows) if matrix.zeros is None else matrix.zeros.split(rows)
    parts = zip(matrix.values.split(rows), matrix.scales.split(rows), zeros, strict=True)
    return [QuantizedMatrix(*part) for part in parts]
