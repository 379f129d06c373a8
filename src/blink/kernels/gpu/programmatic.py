# SPDX-License-Identifier: Apache-2.0
"""Programmatic launches of Triton kernels, on GPUs from Hopper on: a kernel may start before the one in front of it has
ended, and waits for it inside."""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch_options(*, programmatic: bool) -> dict[str, bool]:
    """Return what a launch takes whose kernel calls start_programmatic()."""
    return {"launch_pdl": True} if programmatic else {}


@triton.jit
def start_programmatic():
    """Let the next kernel start, and wait for the end of those in front. No access to memory may stand before it."""
    gdc_launch_dependents()
    gdc_wait()
