# SPDX-License-Identifier: Apache-2.0
"""`--deterministic` on a GPU: one kernel for all sizes of step, of one instruction, and refusals by name."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("needs triton: pip offers it for Linux on x86-64 and arm64", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

import blink.models
from blink.cli.main import main
from blink.config import EngineConfig
from blink.engine.determinism import check_deterministic
from blink.engine.plans import list_buckets
from blink.errors import ConfigError
from blink.kernels.batch import Batch
from blink.kernels.gpu import sampling
from blink.kernels.gpu.device import supposing
from blink.kernels.gpu.gemm import in_tiles
from blink.kernels.gpu.gemm import invariant as gemm
from blink.models.mlps import DenseMlp, MoeMlp, Router
from blink.models.spec import ModelSpec
from blink.models.weights.source import read_spec
from blink.plan.execution_plan import NormStyle
from blink.plan.site import Bucket
from blink.runner.deterministic_device import DeterministicDevice
from blink.runner.planner import plan_model
from blink.runner.run import Runner
from blink.runner.sites import expected_sites
from launch_trace import pretended_gpu
from launch_traces import Case, load_case
from model_specs import make_attention, make_spec

LLAMA = Path(blink.models.__path__[0]) / "configs" / "llama-3-8b"


def spec_of(mlp: Any = None, **options: Any) -> ModelSpec:
    return make_spec("llama", make_attention(8, 2, 64, **options), mlp or DenseMlp(size=1024), num_layers=2)


@pytest.fixture(params=[False, True], ids=["chunks", "ordered"])
def is_ordered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tell by which kernels steps run: those of decoding, or those of models that they refuse."""
    if not request.param:
        refuse_order(monkeypatch)
    return request.param


def refuse_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps have the kernels in chunks."""
    monkeypatch.setattr(in_tiles, "refuses", lambda *_: "other kernels are tested")


def test_all_sizes_of_step_have_the_same_kernels(is_ordered: bool) -> None:
    with supposing("h200"):
        sites = expected_sites(read_spec(LLAMA), 16)
        check_deterministic(sites, "cuda")
        plans = plan_model(DeterministicDevice(), sites, list_buckets(EngineConfig(max_num_batched_tokens=4096))).steps
    assert len(plans) > 40
    assert {plan.norms for plan in plans.values()} == {NormStyle.ORDERED if is_ordered else NormStyle.KERNEL}
    layers = [layer for plan in plans.values() for layer in plan.layers]
    for name in ("qkv", "attend", "output", "gate_up", "down"):
        assert len({getattr(layer, name).kernel for layer in layers}) == 1, name
    assert {plan.head.kernel for plan in plans.values()} == {plans[next(iter(plans))].layers[0].qkv.kernel}


@pytest.mark.parametrize("group", sampling.Group)
def test_the_sampler_cuts_rows_alike_whatever_their_number(group: sampling.Group) -> None:
    def kernels(*, deterministic: bool) -> set[tuple[int, str]]:
        many = torch.empty(300, 1024, dtype=torch.bfloat16)
        counts = (1, 2, 16, 17, 64, 132, 133, 300)
        return {sampling.describe_kernel(many[:rows], group, deterministic=deterministic) for rows in counts}

    with supposing("h200"):
        assert len(kernels(deterministic=True)) == 1 < len(kernels(deterministic=False))


@pytest.mark.parametrize(("rows", "outputs"), [(16, 4096), (32, 4096), (4096, 4096), (128, 512)])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_gemms_of_all_tiles_are_made_of_one_instruction(rows: int, outputs: int, is_fp8: bool) -> None:
    """Among them are no warpgroup MMAs, which a larger tile of four warps would get on Hopper."""
    with supposing("h200"):
        tile = gemm.choose_tile(rows, outputs)
    kernel: Any = vars(gemm)["_multiply"]
    flags = {
        "IS_FP8": is_fp8,
        "FAST": True,
        "HAS_BIAS": False,
        "HAS_TWO": tile.parts == 2,
        "NEIGHBOURS": 16,
        "PDL": True,
    }
    constants = {**flags, "BLOCK_M": tile.rows, "BLOCK_N": tile.outputs, "BLOCK_K": 128}
    types = dict.fromkeys(("x", "weight", "bias", "result"), "*bf16") | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("rows", "outputs", "size"), "i32")
    types |= {"weight": "*fp8e4nv", "scales": "*fp32"} if is_fp8 else {"scales": "*bf16"}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("x", "weight", "result", "size")}
    source = ASTSource(kernel, types, constants, aligned)
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": tile.stages})
    found = set(re.findall(r"(?:wg)?mma\S*", str(code.asm["ptx"])))
    assert found == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"spec": spec_of(window=64)}, "window"),
        ({"spec": spec_of(softcap=30.0)}, "softcap"),
        ({"spec": spec_of(sinks=True)}, "sinks"),
        ({"spec": spec_of(qk_norm="all_heads")}, "one norm over all heads"),
        ({"spec": spec_of(MoeMlp(experts=8, size=48, router=Router(top_k=2)))}, "mixtures of experts"),
        ({"spec": spec_of(DenseMlp(size=1024, biases=True))}, "biases"),
        ({"spec": spec_of(), "kv_dtype": "float8_e4m3fn"}, "a KV cache in float8_e4m3fn"),
        ({"spec": spec_of(), "gguf": True}, "weights in other formats than bfloat16 and FP8 with a scale for each row"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_proved_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    sites = expected_sites(options.pop("spec"), 16, **options)
    with pytest.raises(ConfigError, match=f"--deterministic does not work with {reason}"):
        check_deterministic(sites, "cuda")


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True}, {"qk_norm": "head"}])
def test_biases_of_projections_and_head_norms_are_taken(options: dict[str, Any]) -> None:
    check_deterministic(expected_sites(spec_of(**options), 16), "cuda")


def test_doctor_prints_the_plan_or_why_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_order(monkeypatch)
    plan = ["doctor", str(LLAMA), "--plan", "--gpu", "h200", "--max-num-seqs", "4", "--deterministic"]
    assert main(plan) == 0
    shown = capsys.readouterr().out
    assert "    attend   attention in chunks of one size 16 x 32, chunks of 256 keys (by rule)\n" in shown
    assert "cuBLAS" not in shown
    assert main([*plan, "--quantization", "fp8"]) == 0
    assert "GEMM in one order of FP8" in capsys.readouterr().out
    assert main([*plan, "--kv-cache-dtype", "fp8"]) == 2
    assert "--deterministic does not work with a KV cache in float8_e4m3fn" in capsys.readouterr().err
    assert main([*plan, "--tensor-parallel-size", "2"]) == 2
    assert "leave --tensor-parallel-size out" in capsys.readouterr().err


def test_doctor_prints_the_plan_of_one_order(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["doctor", str(LLAMA), "--plan", "--gpu", "h200", "--max-num-seqs", "4", "--deterministic"]
    assert main(plan) == 0
    shown = capsys.readouterr().out
    assert "decode attention of one order cluster of 4, 4 warps, 2 stages\n" in shown
    assert "GEMM in tiles of one order 64 x 128 x 256, cluster of 2, 2 stages\n" in shown
    assert "Triton" not in shown and "in chunks" not in shown


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"spec": make_spec("llama", make_attention(8, 2, 96), DenseMlp(size=1024), num_layers=2)}, "heads of 96"),
        ({"spec": make_spec("llama", make_attention(32, 2, 64), DenseMlp(size=1024), num_layers=2)}, "16 query heads"),
        ({"spec": make_spec("llama", make_attention(8, 2, 64), DenseMlp(size=1020), num_layers=2)}, "512 x 1020"),
    ],
    ids=["heads", "group", "size"],
)
def test_models_that_decode_kernels_refuse_have_the_others_in_all_steps(options: dict[str, Any], reason: str) -> None:
    with supposing("h200"):
        sites = expected_sites(options["spec"], 16)
        plans = plan_model(DeterministicDevice(), sites, list_buckets(EngineConfig(max_num_batched_tokens=1024))).steps
    assert {plan.norms for plan in plans.values()} == {NormStyle.KERNEL}
    assert {reason in plan.refused[0] for plan in plans.values()} == {True}, next(iter(plans.values())).refused


def launch_all(form: str) -> set[str]:
    """Return what steps of all kinds launch, but for what follows a step's size."""
    noted = list[str]()
    launched = set[str]()
    with pretended_gpu(noted.append):
        model = load_case(Case("llama-3-8b", form))
        sizes: dict[str, Any] = {
            "max_tokens": 512,
            "max_rows": 64,
            "num_slots": 1,
            "max_blocks": 64,
            "max_model_len": 1024,
        }
        batch, cache = Batch.allocate(**sizes, device=model.device), model.allocate_kv_cache(64, 16)
        runner = Runner(model, deterministic=True)
        for tokens, rows, kind in [
            *((rows, rows, "decoding") for rows in (1, 2, 8, 17, 64)),
            *((tokens, min(tokens, 64), kind) for tokens in (16, 80, 512) for kind in ("", "scoring")),
        ]:
            noted.clear()
            runner.forward(batch, cache, Bucket(tokens, rows, kind == "decoding"), scoring=kind == "scoring")
            launched |= {strip_tile(line) for line in noted}
    return launched


SAMPLER = {"find_places", "list_allowed_tokens", "sample_rows"}


def names_of(launched: set[str]) -> set[str]:
    return {re.sub(r"[(<].*", "", line) for line in launched}


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_no_kernel_of_a_step_depends_on_its_size_but_for_the_tiles_of_gemms(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on whether prompts are scored; and no GEMM is PyTorch's."""
    refuse_order(monkeypatch)
    launched = launch_all(form)
    per_token = {"rms_norm._norm", "rotary._rotate_and_store", "activation._activate"}
    invariant = {"gemm.invariant._multiply", "attention.invariant._attend_chunks", "attention.plan._plan"}
    assert names_of(launched) == per_token | SAMPLER | invariant
    for name in ("attention.invariant", "activation", "rotary", "sample_rows", "gemm.invariant"):
        assert len([line for line in launched if line.startswith(name)]) == 1, name


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_no_kernel_of_one_order_depends_on_the_size_of_a_step_but_for_its_tiles(
    form: str,
) -> None:
    """A GEMM of a layer has one split of k; attention of stored tokens differs in when it waits alone."""
    launched = launch_all(form)
    gemm, split = ("gemm_hi_lo_in_tiles", {"gemm.hi_lo._split_row"}) if form == "fp8" else ("gemm_in_tiles", set[str]())
    assert names_of(launched) == {"embed", gemm, "attend", "store_heads", "rms_norm._norm"} | split | SAMPLER
    assert len([line for line in launched if line.startswith("embed")]) == 1
    attention = {line.replace(", true>", ">") for line in launched if line.startswith("attend")}
    assert len(attention) == 1
    gemms = [line for line in launched if line.startswith(gemm)]
    last = 1 if form == "fp8" else 0  # that of the last layer writes bfloat16, for the norm's kernel
    assert len(gemms) == 5 - (form == "bf16") + last, gemms


def strip_tile(line: str) -> str:
    """Leave out what may follow a step's size: the tile of a GEMM, and whether a kernel overlaps the one before it."""
    line = re.sub(r"PDL=\w+, ", "", line)
    if line.startswith("gemm.invariant"):
        return re.sub(r"(BLOCK_[MN]|HAS_TWO|num_stages)=\w+(, )?", "", line)
    tokens_and_stages = r"(_in_tiles<16, (?:false, )?)\d+((?:, \d+){3}), \d+"
    return re.sub(tokens_and_stages, r"\1T\2, S", line)
