# SPDX-License-Identifier: Apache-2.0
"""The plans by which the current GPU runs a model's steps."""

from __future__ import annotations

from blink.models.decoder import Decoder
from blink.plan.execution_plan import StepPlan
from blink.plan.site import Bucket
from blink.runner.gpu_device import GpuDevice
from blink.runner.planner import plan_step
from blink.runner.sites import sites_of


def plan_of(decoder: Decoder, rows: int, *, tokens: int | None = None, block_size: int = 16) -> StepPlan:
    """Return the kernels of so many decoding rows, or where `tokens` are given, of those with prompts among them."""
    bucket = Bucket(tokens or rows, rows, decoding=tokens is None)
    return plan_step(GpuDevice(), sites_of(decoder, block_size), bucket)
