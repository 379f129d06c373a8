# SPDX-License-Identifier: Apache-2.0
"""The update of a GEMM's sums by the adapters of its tokens, in the GEMM: on Hopper, in steps of few tokens.

A kernel multiplies x by A (shrink) while the GEMM runs, and the GEMM adds B times that to its sums: see
csrc/kernels/gemm/gemm_updated.cuh. Both round what shrink finds to bfloat16, as few_tokens.py does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.lora.few_tokens import MOST_TOKENS, count_ways
from blink.kernels.gpu.lora.stack import Stack

HAS_RUN_ON_GPU = False  # until tests/gpu/test_lora_fused.py has passed there
_UNIT = 32  # of k: shrink.cuh's kShrinkK
_ROWS = 16  # of A, that a cluster has: kShrinkRows
_CLUSTER, _WARPS = 8, 4
_TOKENS = (8, 16, 32, 64)


def takes(tokens: int, sizes: Iterable[int]) -> bool:
    """Tell whether a step of so many tokens has its updates in GEMMs of plain bfloat16; sizes: their k."""
    return HAS_RUN_ON_GPU and tokens <= MOST_TOKENS and has_warpgroups() and all(size % _UNIT == 0 for size in sizes)


def begin_words(count: int, device: torch.device) -> Iterator[Tensor]:
    """Yield a zero of its own for each of so many calls of shrink(), all set here: int32 []."""
    return iter(torch.zeros(count, dtype=torch.int32, device=device))


def shrink(x: Tensor, stack: Stack, places: Tensor, adapters: Tensor, begun: Tensor) -> tuple[bytes, Tensor]:
    """Multiply x [tokens, in] by A of each token's adapter, for the GEMM of x that is to be launched next.

    Return its UpdateArgs, and what these name and must live as long. adapters: as few_tokens.list_adapters() returns
    them; begun: int32, 0 when the kernel in front begins.
    """
    (tokens, size), width = x.shape, stack.down.shape[1]
    found = torch.empty(tokens, width, dtype=torch.bfloat16, device=x.device)
    assert x.is_contiguous() and x.dtype == stack.down.dtype == torch.bfloat16 and len(places) == tokens
    assert size % _UNIT == 0 and stack.down.stride(1) == size and stack.up.stride(1) == stack.rank
    arguments = args(
        "ShrinkArgs",
        x=x,
        down=stack.down,
        places=places,
        adapters=adapters,
        found=found,
        begun=begun,
        down_stride=stack.down.stride(0),
        k=size,
        width=width,
        rows=tokens,
    )
    grid = width // _ROWS * _CLUSTER, count_ways(stack, tokens)
    launch(compile_kernel(name_kernel(tokens)), grid, 32 * _WARPS, arguments, cluster=_CLUSTER)
    update = args(
        "UpdateArgs",
        up=stack.up,
        parts=stack.parts,
        places=places,
        adapters=adapters,
        found=found,
        begun=begun,
        up_stride=stack.up.stride(0),
        rank=stack.rank,
        width=width,
        tile=stack.tile,
    )
    return update, found


def name_kernel(tokens: int) -> str:
    """Return the name of shrink for so many tokens."""
    return f"blink::shrink<{next(size for size in _TOKENS if tokens <= size)}, {_CLUSTER}, {_WARPS}>"
