# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""Compiles and links the scheduler for a GPU, from the packaged sources and the CUDA wheels: no toolkit is needed."""

from __future__ import annotations

import functools
from pathlib import Path

from cuda.core import Linker, LinkerOptions, ObjectCode, Program, ProgramOptions
from cuda.pathfinder import find_nvidia_header_directory, find_static_lib

_SOURCES = Path(__file__).parent.parent / "csrc"


@functools.cache
def compile_scheduler(arch: str) -> ObjectCode:
    """Return the linked device program for an architecture such as "sm_90"; takes well under a second.

    Device-side graph launch is a library call: the code is relocatable and linked with cudadevrt.
    """
    include = [str(_SOURCES), str(find_nvidia_header_directory("cudart"))]
    options = ProgramOptions(
        name="scheduler_kernel.cu", std="c++20", arch=arch, relocatable_device_code=True, include_path=include
    )
    code = Program((_SOURCES / "device" / "scheduler_kernel.cu").read_text(), "c++", options).compile("cubin")
    runtime = ObjectCode.from_library(str(find_static_lib("cudadevrt")))
    return Linker(code, runtime, options=LinkerOptions(name="blink_scheduler", arch=arch)).link("cubin")
