# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""One GPU's end of a tensor-parallel group: csrc/kernels/comm/all_reduce.cu, and of few rows all_reduce_spread.cu.

All ranks launch the same exchanges in the same order, each on its own GPU. A launch does not wait; the kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cuda.bindings import driver
from torch import Tensor

from blink.formats.base import Weight
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.comm import spread
from blink.kernels.gpu.comm.boxes import DATA_BYTES, MOST_BLOCKS, Boxes, choose_one_shot, count_units
from blink.kernels.gpu.comm.push import compile_push, find_spread, push_linear
from blink.kernels.gpu.device import has_clusters
from blink.kernels.gpu.gemm import gemv
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
        self._pushed: Tensor | None = None  # what push() has returned last, until the sum is asked for
        self._alone: Tensor | None = None  # its values, if nothing is exchanged
        self.one_shot_bytes = choose_one_shot(self.size)
        self.spreads_rows = spread.HAS_RUN_ON_GPU
        self.is_alone = False  # nothing is exchanged, and sums are of one rank: for runs that load and time kernels

    def add(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' partial results, in the order of ranks: the same bits on each."""
        if partial.is_meta:
            return self._reduce_pushed(partial, None, None, 0.0)
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
        if partial.is_meta:
            return self._reduce_pushed(partial, residual, norm, eps)
        if partial.nbytes > self.one_shot_bytes:
            return rms_norm(self.add(partial), norm, eps, residual)
        partial, width = partial.contiguous(), partial.shape[-1]
        assert width * partial.element_size() % DATA_BYTES == 0
        out = torch.empty_like(partial)
        self._reduce(partial, out, width, norm=norm, residual=residual, eps=eps)
        return out

    def push(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """Send x @ weight.T + bias to all ranks, and return what stands for it: a tensor without memory."""
        assert self._pushed is None
        self._pushed = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device="meta")
        self._check_room(self._pushed.nbytes, self.boxes.lines)
        if self.is_alone:
            compile_push(x, weight, bias)
            self._alone = gemv.linear(x, weight, bias)
        else:
            push_linear(x, weight, bias, self._describe(), self.boxes.memory[self.rank])
        return self._pushed

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
        assert self._pushed is None
        self._num_exchanges = 0

    def _reduce(
        self, partial: Tensor, out: Tensor, width: int, *, norm: Tensor | None, residual: Tensor | None, eps: float
    ) -> None:
        rows = -(-partial.numel() // width)
        chosen = self._choose_spread(rows, partial, norm)
        if chosen is None:
            names = _TYPES[partial.dtype], "void" if norm is None else _TYPES[norm.dtype]
            kernel = compile_kernel(f"blink::all_reduce<{', '.join(names)}>", _SOURCE)
        else:
            kernel = self._compile_spread(chosen, partial, norm, is_pushed=False)
        self._check_room(partial.nbytes, self.boxes.lines)
        if self.is_alone or partial.numel() == 0:
            out.copy_(partial)
            return
        arguments = self._pack(partial, out, width, norm=norm, residual=residual, eps=eps)
        if chosen is None:
            launch(kernel, (min(rows, MOST_BLOCKS), 1), _THREADS, arguments)
        else:
            launch(kernel, (rows * chosen.cluster, 1), spread.THREADS, arguments, cluster=chosen.cluster)

    def _reduce_pushed(self, partial: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float) -> Tensor:
        """Add up what kernels have pushed. The kernel may start before the one that pushes ends."""
        assert partial is self._pushed
        rows, width = partial.shape
        chosen = find_spread(rows, width)
        assert chosen is not None
        kernel = self._compile_spread(chosen, partial, norm, is_pushed=True)
        alone, self._pushed, self._alone = self._alone, None, None
        if alone is not None:
            return alone
        out = torch.empty(partial.shape, dtype=partial.dtype, device=self.boxes.devices[self.rank])
        arguments = self._pack(None, out, width, norm=norm, residual=residual, eps=eps)
        launch(kernel, (rows * chosen.cluster, 1), spread.THREADS, arguments, cluster=chosen.cluster)
        return out

    def _pack(
        self,
        partial: Tensor | None,
        out: Tensor,
        width: int,
        *,
        norm: Tensor | None,
        residual: Tensor | None,
        eps: float,
    ) -> bytes:
        return args(
            "AllReduceArgs",
            ranks=self._next(),
            partial=partial,
            norm=norm,
            residual=residual,
            out=out,
            count=out.numel(),
            width=width,
            eps=eps,
        )

    def _choose_spread(self, rows: int, partial: Tensor, norm: Tensor | None) -> spread.Spread | None:
        """Return how rows are spread over clusters; None: a block has a row."""
        if norm is None or not self.spreads_rows or not has_clusters():
            return None
        return spread.choose_spread(rows, partial.shape[-1] * partial.element_size() // DATA_BYTES)

    def _compile_spread(
        self, chosen: spread.Spread, partial: Tensor, norm: Tensor | None, *, is_pushed: bool
    ) -> driver.CUfunction:
        assert norm is None or norm.data_ptr() % 16 == 0
        kind = "void" if norm is None else _TYPES[norm.dtype]
        sizes = f"{self.size}, {chosen.cluster}, {chosen.lines}, {str(is_pushed).lower()}"
        name = f"blink::all_reduce_spread<{_TYPES[partial.dtype]}, {kind}, {sizes}>"
        return compile_kernel(name, "comm/all_reduce_spread.cu")

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
