# SPDX-License-Identifier: Apache-2.0
"""One GPU's end of a tensor-parallel group: csrc/kernels/comm/all_reduce.cu, and of few rows all_reduce_spread.cu.

All ranks launch the same exchanges in the same order, each on its own GPU. A launch does not wait; the kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.comm import spread
from blink.kernels.gpu.comm.boxes import DATA_BYTES, MOST_BLOCKS, Boxes, choose_one_shot, count_units
from blink.kernels.gpu.device import has_clusters
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.rms_norm import rms_norm

_SOURCE = "comm/all_reduce.cu"
_THREADS = 512
_FLAT_LINES = 512  # of a block, in what has no rows
_TYPES = {torch.bfloat16: "blink::Bf16", torch.float16: "blink::F16", torch.float32: "float"}


class GpuRanks:
    """A rank's end of the group; see kernels/all_reduce.py."""

    def __init__(self, boxes: Boxes, rank: int, starts: Sequence[int]) -> None:
        """starts: where each rank's columns of the logits begin, and at the end how many there are."""
        self.rank, self.size = rank, len(boxes.devices)
        self.boxes, self._starts = boxes, tuple(starts)
        self._starts_there = torch.tensor(starts, dtype=torch.int32, device=boxes.devices[rank])
        self._num_exchanges = 0  # of the step that is enqueued
        self.one_shot_bytes = choose_one_shot(self.size)
        self.spreads_rows = True  # few rows of a norm; tests compare that with a block a row
        self.is_alone = False  # nothing is exchanged, and sums are of one rank: for runs that load and time kernels

    def add(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' partial results, in the order of ranks: the same bits on each."""
        partial = partial.contiguous()
        out = torch.empty_like(partial)
        if partial.nbytes > self.one_shot_bytes:
            self._reduce_parts(partial, out)
        else:
            width = DATA_BYTES // partial.element_size() * _FLAT_LINES
            self._reduce(partial, out, width, norm=None, residual=None, eps=0.0)
        return out

    def add_norm(self, partial: Tensor, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add that sum to the residual [rows, width] in place, and return its RMS norm; norm: the weights [width]."""
        assert residual.is_contiguous() and residual.shape == partial.shape and norm.shape == partial.shape[-1:]
        if partial.nbytes > self.one_shot_bytes:
            return rms_norm(self.add(partial), norm, eps, residual)
        partial, width = partial.contiguous(), partial.shape[-1]
        assert width * partial.element_size() % DATA_BYTES == 0
        out = torch.empty_like(partial)
        self._reduce(partial, out, width, norm=norm, residual=residual, eps=eps)
        return out

    def join(self, part: Tensor) -> Tensor:
        """Return all ranks' columns of a matrix [rows, columns] on the first rank; on others no row."""
        rows, width = part.shape
        assert width == self._starts[self.rank + 1] - self._starts[self.rank]
        out = part.new_zeros(rows if self.rank == 0 else 0, self._starts[-1])
        kernel = compile_kernel(f"blink::join<{_TYPES[part.dtype]}>", _SOURCE)
        widest = max(end - start for start, end in zip(self._starts, self._starts[1:], strict=False))
        self._check_room(rows * widest * part.element_size(), self.boxes.lines)
        if not self.is_alone:
            part, starts, place = part.contiguous(), self._starts_there, self._next()
            blocks = min(-(-rows * widest * part.element_size() // (DATA_BYTES * _THREADS)), MOST_BLOCKS)
            arguments = args("JoinArgs", ranks=place, part=part, out=out, starts=starts, rows=rows)
            launch(kernel, (blocks, 1), _THREADS, arguments)
        return out

    def end_step(self, failed: Tensor) -> None:
        """Enqueue the end of a step; failed: the word that is written if a rank was lost, int32 [1]."""
        kernel = compile_kernel("blink::end_step<1>", _SOURCE)
        if not self.is_alone:
            launch(kernel, (1, 1), 1, args("EndStepArgs", ranks=self._describe(), failed=failed))
        self._num_exchanges = 0

    def _reduce(
        self, partial: Tensor, out: Tensor, width: int, *, norm: Tensor | None, residual: Tensor | None, eps: float
    ) -> None:
        names = [_TYPES[partial.dtype], "void" if norm is None else _TYPES[norm.dtype]]
        rows = -(-partial.numel() // width)
        chosen = self._choose_spread(rows, partial, norm)
        if chosen is None:
            kernel = compile_kernel(f"blink::all_reduce<{', '.join(names)}>", _SOURCE)
            blocks, threads, cluster = min(rows, MOST_BLOCKS), _THREADS, 1
        else:
            names += map(str, (self.size, chosen.cluster, chosen.lines))
            kernel = compile_kernel(f"blink::all_reduce_spread<{', '.join(names)}>", "comm/all_reduce_spread.cu")
            blocks, threads, cluster = rows * chosen.cluster, spread.THREADS, chosen.cluster
        self._check_room(partial.nbytes, self.boxes.lines)
        if self.is_alone or partial.numel() == 0:
            out.copy_(partial)
            return
        arguments = args(
            "AllReduceArgs",
            ranks=self._next(),
            partial=partial,
            norm=norm,
            residual=residual,
            out=out,
            count=partial.numel(),
            width=width,
            eps=eps,
        )
        launch(kernel, (blocks, 1), threads, arguments, cluster=cluster)

    def _choose_spread(self, rows: int, partial: Tensor, norm: Tensor | None) -> spread.Spread | None:
        """Return how rows are spread over clusters; None: a block has a row."""
        if norm is None or not self.spreads_rows or not has_clusters():
            return None
        assert norm.data_ptr() % 16 == 0
        return spread.choose_spread(rows, partial.shape[-1] * partial.element_size() // DATA_BYTES)

    def _reduce_parts(self, partial: Tensor, out: Tensor) -> None:
        kernel = compile_kernel(f"blink::two_shot<{_TYPES[partial.dtype]}>", "comm/two_shot.cu")
        self._check_room(partial.nbytes, self.size * self.boxes.pieces)
        if self.is_alone:
            out.copy_(partial)
            return
        place, blocks = self._next(), min(count_units(partial.nbytes, self.size), MOST_BLOCKS)
        arguments = args("TwoShotArgs", ranks=place, partial=partial, out=out, count=partial.numel())
        launch(kernel, (blocks, 1), _THREADS, arguments)

    def _check_room(self, num_bytes: int, count: int) -> None:
        if num_bytes > count * DATA_BYTES:
            raise ValueError(f"an exchange of {num_bytes} bytes; the boxes take {count * DATA_BYTES}")

    def _next(self) -> bytes:
        """Return what the next exchange of the step is given."""
        found = self._describe()
        self._num_exchanges += 1
        return found

    def _describe(self) -> bytes:
        boxes = self.boxes
        return args(
            "RankArgs",
            boxes=boxes.places[self.rank],
            lines=boxes.lines,
            pieces=boxes.pieces,
            rank=self.rank,
            size=self.size,
            op=self._num_exchanges,
        )
