# SPDX-License-Identifier: Apache-2.0
"""The update of a GEMM's sums by the adapters of its tokens, in the GEMM: on Hopper, in steps of few tokens.

A kernel multiplies x by A (shrink) while the GEMM runs, and the GEMM adds B times that to its sums: see
csrc/kernels/gemm/gemm_updated.cuh. What shrink finds is rounded to bfloat16 in between, as few_tokens.py does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blink.formats.base import Weight
from blink.formats.layouts import Matrix
from blink.formats.schemes import BF16
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.gpu.gemm.gemm_kernel import GemmUpdate
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.lora.few_tokens import MOST_TOKENS, count_ways
from blink.kernels.gpu.lora.stack import Stack
from blink.plan.site import first_reason

_UNIT = 32  # of k: shrink.cuh's kShrinkK
_ROWS = 16  # of A, that a cluster has: kShrinkRows
_CLUSTER, _WARPS = 8, 4
_TOKENS = (8, 16, 32, 64)


def refuses(matrix: Matrix, tokens: int) -> str | None:
    """Say why the GEMM of so many tokens and a weight does not add updates; None: it does."""
    encoding = matrix.dtype if matrix.encoding is None else matrix.encoding.format.name
    return first_reason(
        {
            "no Hopper": not has_warpgroups(),
            f"updates of more than {MOST_TOKENS} tokens": tokens > MOST_TOKENS,
            f"updates of a matrix in {encoding}": matrix.encoding != BF16,
            f"updates of rows of {matrix.k}": matrix.k % _UNIT != 0,
        }
    )


class FusedUpdates:
    """The updates of a step's tokens, each begun in front of its GEMM."""

    def __init__(self, stacks: Mapping[int, Stack], places: Tensor, adapters: Tensor) -> None:
        """Take what GpuUpdates has. The kernel that is launched next must not be launched early.

        adapters: as few_tokens.list_adapters() returns them.
        """
        self._stacks, self._places, self._adapters, self._turn = stacks, places, adapters, 0
        self._begun = torch.zeros(1, dtype=torch.int32, device=places.device)

    def begin(self, x: Tensor, weight: Weight) -> GemmUpdate | None:
        """Multiply x [tokens, in] by A of each token's adapter, for the GEMM of x that is to be launched next.

        Return what that adds; None: no adapter changes the weight.
        """
        stack = self._stacks.get(id(weight))
        if stack is None:
            return None
        self._turn += 1
        found = torch.empty(len(x), stack.down.shape[1], dtype=torch.bfloat16, device=x.device)
        self._shrink(x, stack, found)
        update = args(
            "UpdateArgs",
            up=stack.up,
            parts=stack.parts,
            places=self._places,
            distinct=self._adapters,
            found=found,
            begun=self._begun,
            up_stride=stack.up.stride(0),
            turn=self._turn,
            rank=stack.rank,
            width=found.shape[1],
            tile=stack.tile,
        )
        return GemmUpdate(update, found)

    def _shrink(self, x: Tensor, stack: Stack, found: Tensor) -> None:
        (tokens, size), width = x.shape, found.shape[1]
        assert x.is_contiguous() and x.dtype == stack.down.dtype == torch.bfloat16 and len(self._places) == tokens
        assert size % _UNIT == 0 and stack.down.stride(1) == size and stack.up.stride(1) == stack.rank
        arguments = args(
            "ShrinkArgs",
            x=x,
            down=stack.down,
            places=self._places,
            distinct=self._adapters,
            found=found,
            begun=self._begun,
            down_stride=stack.down.stride(0),
            turn=self._turn,
            k=size,
            width=width,
            rows=tokens,
        )
        grid = width // _ROWS * _CLUSTER, count_ways(stack, tokens)
        launch(compile_kernel(name_kernel(tokens)), grid, 32 * _WARPS, arguments, cluster=_CLUSTER)


def name_kernel(tokens: int) -> str:
    """Return the name of shrink for so many tokens."""
    return f"blink::shrink<{next(size for size in _TOKENS if tokens <= size)}, {_CLUSTER}, {_WARPS}>"
