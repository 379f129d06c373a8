# SPDX-License-Identifier: Apache-2.0
"""Execution plans: those that were recorded, and that a description alone gives the plan of the loaded weights."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("needs triton: pip offers it for Linux on x86-64 and arm64", allow_module_level=True)

from blink.cli.main import main
from blink.config import EngineConfig
from blink.engine.plans import list_buckets
from blink.formats.layouts import Layout
from blink.kernels.gpu.lora import fused
from blink.plan.execution_plan import NormStyle
from blink.plan.site import Bucket
from blink.runner.gpu_device import GpuDevice
from blink.runner.planner import plan_model
from blink.runner.sites import expected_sites, sites_of
from golden_plans import CASES, RECORDED, Case, show_plan
from launch_trace import pretended_gpu
from launch_traces import Case as Loaded
from launch_traces import load_case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plans_are_what_was_recorded(case: Case) -> None:
    recorded = (RECORDED / f"{case.name}.txt").read_text()
    assert show_plan(case) == recorded, "if it must: python tests/shared/golden_plans.py writes the files anew"


@pytest.mark.parametrize(
    "case",
    [
        Loaded("llama-3-8b", "bf16"),
        Loaded("llama-3-8b", "fp8"),
        Loaded("llama-3-8b", "bf16", kv_dtype="fp8"),
        Loaded("phi-4", "awq"),
        Loaded("gpt-oss-20b", "fp8"),
        Loaded("gpt-oss-20b", "awq"),
        pytest.param(Loaded("qwen3-30b-a3b", "fp8-block"), marks=pytest.mark.long),
        pytest.param(Loaded("gpt-oss-20b", "mxfp4"), marks=pytest.mark.long),
    ],
    ids=lambda case: case.name,
)
def test_a_description_alone_gives_the_plan_of_the_weights(case: Loaded) -> None:
    buckets = [Bucket(rows, rows, decoding=True) for rows in (1, 2, 3, 17, 64, 65, 200)]
    buckets += [Bucket(tokens, min(tokens, 256), decoding=False) for tokens in (16, 80, 96, 128, 300, 2048)]
    with pretended_gpu(lambda _: None):
        model = load_case(case)
        kv_dtype = "float8_e4m3fn" if case.kv_dtype == "fp8" else "bfloat16"
        described = expected_sites(model.spec, 16, fp8=case.format == "fp8", kv_dtype=kv_dtype)
        loaded = sites_of(model, 16)
        assert list(loaded.layers) == list(described.layers)
        assert loaded.head == described.head
        device = GpuDevice()
        assert plan_model(device, loaded, buckets).show() == plan_model(device, described, buckets).show()


def test_doctor_prints_a_plan_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(RECORDED.parents[2] / "src" / "blink" / "models" / "configs" / "llama-3-8b")
    assert main(["doctor", folder, "--plan", "--gpu", "h100", "--max-num-seqs", "24"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("llama-3-8b on NVIDIA H100 80GB HBM3: 32 layers\ndecode, 1 row\n")
    assert "decode, 24 rows\n" in shown and "decode, 32 rows\n" not in shown
    assert "    qkv      gemm 64 x 24 x 256, cluster of 1, 4 stages (tuned)\n" in shown
    assert "(with more than 2 rows GEMMs are faster)" in shown
    assert main(["doctor", folder, "--plan", "--gpu", "b900"]) == 2
    assert "--gpu b900 is not known; use h100, h200, a100, l40s." in capsys.readouterr().err


def test_steps_with_adapters_keep_activations_apart_from_the_gemms_and_norms_where_weights_are_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "refuses", lambda *_: "a test")  # what it takes: test_fused_updates.py
    with pretended_gpu(lambda _: None):
        sites = expected_sites(load_case(Loaded("llama-3-8b", "bf16")).spec, 16)
        sizes = [Bucket(rows, rows, decoding=True) for rows in (1, 32)] + [Bucket(40, 8, decoding=False)]
        plans = plan_model(GpuDevice(), sites, [*sizes, *(replace(size, adapters=True) for size in sizes)]).steps
        packed_sites = expected_sites(load_case(Loaded("llama-3-8b", "bf16")).spec, 16, fp8=True)
        packed = plan_model(GpuDevice(), packed_sites, [replace(size, adapters=True) for size in sizes]).steps
    for size in sizes:
        plain, step = plans[size], plans[replace(size, adapters=True)]
        assert plain.norms is not NormStyle.KERNEL
        assert step.norms is NormStyle.WRITER
        gate_up = step.layers[0].gate_up
        assert gate_up is not None and gate_up.kernel not in {kernel.name for kernel in GpuDevice.gated[Layout.ROWS]}
    assert {plan.norms for plan in packed.values()} == {NormStyle.KERNEL}


def test_every_size_of_step_of_an_engine_is_planned() -> None:
    buckets = list(list_buckets(EngineConfig(max_num_seqs=8, max_num_batched_tokens=64)))
    assert [bucket.rows for bucket in buckets if bucket.decoding] == [1, 2, 4, 8]
    assert [bucket.tokens for bucket in buckets if not bucket.decoding] == [16, 32, 48, 64]
