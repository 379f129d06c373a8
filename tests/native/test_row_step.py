# SPDX-License-Identifier: Apache-2.0
"""The step of one row by one kernel: its device code on emulated threads, beside a plain reference."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blink.kernels.gpu.decode import row_step
from blink.kernels.gpu.decode.row_step import Form, RowShape
from conftest import Compile
from test_native_programs import run

_HERE = Path(__file__).parent
_SOURCES = _HERE.parents[1] / "src" / "blink" / "csrc" / "gpu" / "decode"
# The forms of layers, experts and output, how many experts, and whether heads have a norm.
MODELS = {
    "bf16": (Form.BF16, Form.BF16, Form.BF16, 0, False),
    "fp8": (Form.FP8, Form.FP8, Form.FP8, 0, True),
    "int4": (Form.INT4, Form.INT4, Form.BF16, 0, False),
    "experts": (Form.BF16, Form.BF16, Form.BF16, 64, True),
    "experts-fp8": (Form.FP8, Form.FP8_ROWS, Form.FP8, 64, False),
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
    compile_native: Compile, device_code: Path, model: str, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, expert_form, head_form, experts, head_norm = MODELS[model]
    names = [part.value.rpartition(":")[2] for part in (form, expert_form, head_form)]
    program = compile_native(
        "row_step.cpp",
        "-O1",
        "-w",
        "-fno-strict-aliasing",
        f"-I{device_code}",
        *(f"-D{part}={name}" for part, name in zip(("FORM", "EXPERT_FORM", "HEAD_FORM"), names, strict=True)),
        f"-DEXPERTS={experts}",
        f"-DHEAD_NORM={str(head_norm).lower()}",
    )
    counts = run(program, context, 2, 3)
    assert counts["error"] < 10_000 and counts["changed"] == 0
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=1 + 6))
    monkeypatch.setattr(row_step, "_MOST_PARTS", 2)
    shape = RowShape(
        form=form,
        mlp_form=expert_form,
        head_form=head_form,
        hidden=512,
        width=256 if experts else 1024,
        num_experts=experts,
        top_k=4 if experts else 0,
        num_heads=8,
        kv_heads=2,
        head_dim=64,
        rotary_dim=64,
        block_size=16,
        head_norm=head_norm,
    )
    assert shape.words == counts["words"]
    assert counts["bytes"] <= shape.count_bytes(4) < counts["bytes"] + 8192
