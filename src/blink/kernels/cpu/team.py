# SPDX-License-Identifier: Apache-2.0
"""The threads of this project's own kernels: csrc/cpu/team.h. As many as PyTorch's, whose own sleep meanwhile."""

from __future__ import annotations

from functools import cache

import torch

from blink.region.native import lib


def find_team() -> int:
    """Return the address of a team that with its caller has as many threads as PyTorch uses."""
    return _start(torch.get_num_threads())


@cache
def _start(threads: int) -> int:
    return lib.blink_team_start(threads - 1)
