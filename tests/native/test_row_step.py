# SPDX-License-Identifier: Apache-2.0
"""The step of one row by one kernel: its device code on emulated threads, beside a plain reference."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conftest import Compile
from test_native_programs import run

_HERE = Path(__file__).parent
_SOURCES = _HERE.parents[1] / "src" / "blink" / "csrc" / "gpu" / "decode"
MODELS = {
    "bf16": ("kBf16", "kBf16", "kBf16", 0, False),
    "fp8": ("kFp8", "kFp8", "kFp8", 0, True),
    "int4": ("kInt4", "kInt4", "kBf16", 0, False),
    "experts": ("kBf16", "kBf16", "kBf16", 64, True),
    "experts-fp8": ("kFp8", "kFp8Rows", "kFp8", 64, False),
}


@pytest.fixture(scope="session")
def device_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the kernels' headers, those of the GPU's instructions replaced."""
    folder = tmp_path_factory.mktemp("device")
    for header in (*_SOURCES.glob("*.cuh"), *(_HERE / "gpu").iterdir()):
        shutil.copy(header, folder)
    return folder


@pytest.mark.parametrize(
    "context", [70, *(pytest.param(length, marks=pytest.mark.long) for length in (1, 16, 17, 400))]
)
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_right_in_any_order_of_threads(
    compile_native: Compile, device_code: Path, model: str, context: int
) -> None:
    form, expert_form, head_form, experts, head_norm = MODELS[model]
    program = compile_native(
        "row_step.cpp",
        "-O1",
        "-w",
        "-fno-strict-aliasing",
        f"-I{device_code}",
        f"-DFORM={form}",
        f"-DEXPERT_FORM={expert_form}",
        f"-DHEAD_FORM={head_form}",
        f"-DEXPERTS={experts}",
        f"-DHEAD_NORM={str(head_norm).lower()}",
    )
    counts = run(program, context, 2, 3)
    assert counts["error"] < 10_000 and counts["changed"] == 0
