# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launches (PDL) of Triton kernels, on GPUs from Hopper on.

A kernel may start before the one in front of it has ended, and waits for it inside.
"""

from __future__ import annotations

from typing import Any, Final

import triton
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blink.kernels.gpu.device import has_clusters

MOST_ROWS: Final = 64  # of more, kernels are longer than a launch


def launch_options(*, pdl: bool) -> dict[str, bool]:
    """Return what a launch takes whose kernel calls start_pdl()."""
    return {"launch_pdl": True} if pdl else {}


def overlap(x: Tensor, rows: int) -> dict[str, Any]:
    """Return what a launch for some rows of x takes, whose kernel calls start_pdl() if its constant PDL says so."""
    if not (x.is_cuda and rows <= MOST_ROWS and has_clusters()):
        return {}
    return {"PDL": True, **launch_options(pdl=True)}


@triton.jit
def start_pdl():
    """Let the next kernel start, and wait for the end of those in front. No access to memory may stand before it."""
    gdc_launch_dependents()
    gdc_wait()
