# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels for quantised weights, and the threads that they share work with, under sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from blink.kernels.cpu.gguf_weight import Isa
from conftest import Compile
from test_native_programs import build, run

FLAGS = {
    Isa.PLAIN: (),
    Isa.AVX2: ("-mavx2", "-mfma", "-mf16c"),
    Isa.AVX512: ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
}


@pytest.mark.parametrize("helpers", [pytest.param(0, marks=pytest.mark.long), 3])
def test_all_work_is_done_once_and_seen_by_the_caller(compile_native: Compile, helpers: int) -> None:
    program: Path = build(compile_native, "thread_pool.cpp", "thread", "-O1")
    assert run(program, helpers, 2000) == {"failures": 0, "pieces": 4000}


@pytest.mark.long
@pytest.mark.parametrize("isa", FLAGS, ids=lambda isa: isa.name)
def test_products_touch_nothing_beyond_their_operands(compile_native: Compile, isa: Isa) -> None:
    if not isa.is_here:
        pytest.skip(f"{isa.name} is not here")
    program = build(compile_native, "gguf_matmul.cpp", "address", "-O1", *FLAGS[isa])
    assert run(program) == {"wrong": 0, "products": 420}
