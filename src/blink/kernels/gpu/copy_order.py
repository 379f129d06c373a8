# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""The end of a copy that the scheduler has ordered while steps run."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def mark_done(order: Tensor) -> None:
    """Write an order's number order[2] to order[3], behind all that was enqueued before.

    order: int32 [4], csrc's CopyOrder or HostOrder.
    """
    _mark_done[(1,)](order, num_warps=1)


@triton.jit
def _mark_done(order):
    tl.atomic_xchg(order + 3, tl.load(order + 2), sem="release", scope="gpu")
