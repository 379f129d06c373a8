# SPDX-License-Identifier: Apache-2.0
"""Steps whose GEMMs add adapters' updates to their own sums: what they launch, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("needs triton: pip offers it for Linux on x86-64 and arm64", allow_module_level=True)

from blink.adapters.modules import find_weights
from blink.formats.layouts import Layout, Matrix
from blink.formats.schemes import BF16, FP8_ROW, INT4, Encoding
from blink.kernels.batch import Batch
from blink.kernels.gpu.device import supposing
from blink.kernels.gpu.lora import fused
from blink.kernels.gpu.lora.memory import GpuUpdates
from blink.kernels.gpu.lora.stack import Stack
from blink.kernels.gpu.lora.update import mark_tokens
from blink.kernels.lora import WeightParts
from blink.models.decoder import Decoder
from blink.models.weights.source import read_spec
from blink.plan.execution_plan import NormStyle, StepPlan
from blink.plan.site import Bucket
from blink.runner.gpu_device import GpuDevice
from blink.runner.planner import plan_step
from blink.runner.run import Runner
from blink.runner.sites import expected_sites
from launch_trace import pretended_gpu
from launch_traces import RECORDED, Case, load_case

SLOTS, RANK, LAYERS = 8, 16, 3
DECODING, PROMPTS = Bucket(32, 32, decoding=True, adapters=True), Bucket(40, 8, adapters=True)
CONFIGS = RECORDED.parents[2] / "src" / "blink" / "models" / "configs"


def make_stack(parts: WeightParts) -> Stack:
    """Return matrices without memory."""
    out, size = parts.shape
    down = torch.empty(SLOTS, len(parts.rows) * RANK, size, dtype=torch.bfloat16, device="cuda")
    up = torch.empty(SLOTS, out, RANK, dtype=torch.bfloat16, device="cuda")
    return Stack(down, up, torch.zeros(out // 256, dtype=torch.int32, device="cuda"), len(parts.rows), 256)


@contextmanager
def loaded(lines: list[str]) -> Iterator[tuple[Decoder, dict[int, Stack]]]:
    """Pretend that a GPU has Llama-3-8B and its adapters; note what is launched."""
    with pretended_gpu(lines.append):
        model = load_case(Case("llama-3-8b", "bf16"))
        yield model, {key: make_stack(parts) for key, parts in find_weights(model).items()}


def trace(bucket: Bucket) -> list[str]:
    """Return what a step launches."""
    lines: list[str] = []
    with loaded(lines) as (model, stacks):
        batch = Batch.allocate(
            max_tokens=64, max_rows=32, num_slots=32, max_blocks=8, max_model_len=128, device=model.device
        )
        slots = torch.zeros(SLOTS, dtype=torch.int32, device="cuda")

        def find(batch: Batch, size: Bucket) -> GpuUpdates | None:
            return GpuUpdates(stacks, mark_tokens(batch, slots, size.tokens, size.rows)) if size.adapters else None

        runner = Runner(model)
        runner.find_updates = find
        runner.compute_logits(batch, model.allocate_kv_cache(8, 16), bucket)
    return lines


def name(line: str) -> str:
    return line.partition("<")[0].partition("(")[0]


def is_of_adapters(line: str) -> bool:
    return name(line) in ("shrink", "lora.update._mark", "lora.few_tokens._list")


@pytest.mark.parametrize("bucket", [DECODING, PROMPTS])
def test_a_step_launches_shrink_in_front_of_each_projection_and_else_what_one_without_adapters_does(
    bucket: Bucket,
) -> None:
    found, plain = trace(bucket), trace(Bucket(bucket.tokens, bucket.rows, bucket.decoding))
    assert not any(is_of_adapters(line) or "gemm_updated" in line for line in plain)
    assert [line.replace("gemm_updated", "gemm") for line in found if not is_of_adapters(line)] == plain
    updated = [place for place, line in enumerate(found) if name(line) == "gemm_updated"]
    assert len(updated) == 4 * LAYERS
    assert [place for place, line in enumerate(found) if name(line) == "shrink"] == [place - 1 for place in updated]
    tokens = 32 if bucket is DECODING else 64
    assert {line for line in found if name(line) == "shrink"} == {f"shrink<{tokens}, 8, 4>"}
    outputs = [line.partition("Output::")[2].partition(",")[0] for line in found if name(line) == "gemm_updated"]
    assert outputs == ["kStore", "kAdd", "kGate", "kAdd"] * LAYERS


def test_a_step_whose_gemms_refuse_updates_has_kernels_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "refuses", lambda *_: "a test")
    names = [name(line) for line in trace(DECODING)]
    assert "gemm_updated" not in names and "shrink" not in names
    assert names.count("lora.few_tokens._shrink") == names.count("lora.few_tokens._expand") == 4 * LAYERS


def test_each_product_of_a_step_has_a_turn_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of one weight: a GEMM must not take an earlier shrink for its own."""
    turns: list[tuple[str, Any]] = []

    def note(struct: str, **values: Any) -> bytes:
        turns.append((struct, values["turn"]))
        return b""

    monkeypatch.setattr(fused, "args", note)
    with loaded([]) as (model, stacks):
        places, adapters = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in (32, 80))
        updates, layer = fused.FusedUpdates(stacks, places, adapters), model.layers[0]
        x = torch.empty(32, 4096, dtype=torch.bfloat16, device="cuda")
        other = torch.empty(1, device="cuda")
        assert updates.begin(x, other) is None
        assert all(updates.begin(x, weight) is not None for weight in (layer.qkv, layer.qkv, layer.output))
    assert turns == [(struct, turn) for turn in (1, 2, 3) for struct in ("ShrinkArgs", "UpdateArgs")]


@pytest.mark.parametrize(
    ("matrix", "tokens", "gpu", "reason"),
    [
        (Matrix(6144, 4096, Layout.ROWS, BF16), 64, "h200", None),
        (Matrix(6144, 4096, Layout.ROWS, BF16), 1, "h100", None),
        (Matrix(6144, 4096, Layout.ROWS, BF16), 65, "h200", "updates of more than 64 tokens"),
        (Matrix(6144, 4096, Layout.ROWS, BF16), 8, "a100", "no Hopper"),
        (Matrix(6144, 4112, Layout.ROWS, BF16), 8, "h200", "updates of rows of 4112"),
        (Matrix(6144, 4096, Layout.ROWS, None, "float16"), 8, "h200", "updates of a matrix in float16"),
        (Matrix(6144, 4096, Layout.ROWS, None, "float32"), 8, "h200", "updates of a matrix in float32"),
        (Matrix(6144, 4096, Layout.UNITS, FP8_ROW), 8, "h200", "updates of a matrix in FP8"),
        (Matrix(6144, 4096, Layout.UNITS, INT4), 8, "h200", "updates of a matrix in INT4"),
    ],
)
def test_others_are_refused_by_name(matrix: Matrix, tokens: int, gpu: str, reason: str | None) -> None:
    with supposing(gpu):
        assert fused.refuses(matrix, tokens) == reason


def plan(encoding: Encoding, bucket: Bucket) -> StepPlan:
    """Plan a step of Llama-3-8B on an H100."""
    with supposing("h100"):
        sites = expected_sites(read_spec(CONFIGS / "llama-3-8b"), 16, fp8=encoding == FP8_ROW)
        return plan_step(GpuDevice(), sites, bucket)


def test_a_plan_names_why_updates_are_not_in_gemms() -> None:
    style = NormStyle.UPDATED.value
    assert plan(BF16, DECODING).norms is NormStyle.UPDATED
    packed, many = plan(FP8_ROW, DECODING), plan(BF16, Bucket(65, 65, decoding=True, adapters=True))
    assert packed.norms is NormStyle.KERNEL and f"{style} (updates of a matrix in FP8)" in packed.refused
    assert many.norms is NormStyle.WRITER and f"{style} (updates of more than 64 tokens)" in many.refused
