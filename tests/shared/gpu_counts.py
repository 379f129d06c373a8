# SPDX-License-Identifier: Apache-2.0
"""For tests of several GPUs: with how many ranks they run, and why where they cannot."""

from __future__ import annotations

import pytest
import torch

from triton_interpreter import IS_INTERPRETED


def needs_gpus(count: int, reason: str) -> pytest.MarkDecorator:
    """Return the mark of what runs on so many GPUs alone."""
    return pytest.mark.skipif(IS_INTERPRETED or torch.cuda.device_count() < count, reason=reason)


TWO_GPUS = needs_gpus(2, "needs two GPUs")
on_ranks = pytest.mark.parametrize(
    "ranks", [pytest.param(2, id="two"), pytest.param(4, id="four", marks=needs_gpus(4, "needs four GPUs"))]
)
