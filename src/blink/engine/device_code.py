# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""Compiles and links the scheduler for a GPU, from the packaged sources and the CUDA wheels: no toolkit is needed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from cuda.core import Linker, LinkerOptions, ObjectCode, Program, ProgramOptions
from cuda.pathfinder import find_nvidia_header_directory, find_static_lib

_SOURCES = Path(__file__).parent.parent / "csrc"


@functools.cache
def compile_scheduler(arch: str) -> ObjectCode:
    """Return the linked device program for an architecture such as "sm_90"; takes seconds."""
    runtime = ObjectCode.from_library(str(find_static_lib("cudadevrt")))
    linker = Linker(compile_source(arch), runtime, options=LinkerOptions(name="blink_scheduler", arch=arch))
    return linker.link("cubin")


def compile_source(arch: str, kind: Literal["cubin", "ltoir"] = "cubin") -> ObjectCode:
    """Return the program before it is linked; needs no GPU. kind: ltoir takes a tenth of the time.

    Device-side graph launch is a library call: the code is relocatable, to be linked with cudadevrt.
    """
    include = [str(_SOURCES), str(find_nvidia_header_directory("cudart"))]
    options = ProgramOptions(
        name="scheduler_kernel.cu",
        std="c++20",
        arch=arch,
        relocatable_device_code=True,
        link_time_optimization=kind == "ltoir",
        include_path=include,
    )
    return Program((_SOURCES / "device" / "scheduler_kernel.cu").read_text(), "c++", options).compile(kind)
