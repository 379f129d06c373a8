# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launches (PDL) of Triton kernels, on GPUs from Hopper on.

A kernel may start before the one in front of it has ended, and waits for it inside.
"""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch_options(*, pdl: bool) -> dict[str, bool]:
    """Return what a launch takes whose kernel calls start_pdl()."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def start_pdl():
    """Let the next kernel start, and wait for the end of those in front. No access to memory may stand before it."""
    gdc_launch_dependents()
    gdc_wait()
