# SPDX-License-Identifier: Apache-2.0
"""Which kernels the planner chooses on an H100, and what it says of those that it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("needs triton: pip offers it for Linux on x86-64 and arm64", allow_module_level=True)

import blink.models
from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.formats.layouts import Layout, Matrix
from blink.formats.schemes import BF16, FP8_BLOCK, FP8_ROW, FP8_ROWS, INT4, Encoding
from blink.kernels.gpu.device import supposing
from blink.kernels.gpu.latent.expanded import EXPANDED
from blink.models.mlps import DenseMlp, MoeMlp, Router
from blink.models.mtp_spec import describe_mtp
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from blink.plan.execution_plan import Choice, NormStyle, StepPlan
from blink.plan.site import Bucket
from blink.runner.gpu_device import (
    GATHERED,
    LATENT_ATTENTION,
    MAX_MIXED_TOKENS,
    PAGED_ATTENTION,
    PERMUTED,
    STREAMED,
    GpuDevice,
)
from blink.runner.gpu_recurrences import DELTA_DECODE
from blink.runner.planner import choose_gated, choose_matmul, plan_step
from blink.runner.sites import LayerSites, ModelSites, expected_sites
from model_specs import attention_of, make_attention, make_spec

_CONFIGS = Path(blink.models.__path__[0]) / "configs"
_SHAPES = Path(__file__).parents[2] / "benchmarks" / "configs"
MIXTURE = MoeMlp(experts=8, size=48, router=Router(top_k=2, renormalize=True))
DENSE = make_spec("llama", make_attention(8, 2, 64), DenseMlp(size=1024), num_layers=3)


@pytest.fixture(autouse=True)
def _h100() -> Iterator[None]:
    with supposing("h100"):
        yield


def plan(model: ModelSites, rows: int, *, tokens: int = 0) -> StepPlan:
    return plan_step(GpuDevice(), model, Bucket(tokens or rows, rows, decoding=not tokens))


def packed(matrix: Matrix, encoding: Encoding) -> Matrix:
    return Matrix(matrix.n, matrix.k, Layout.UNITS, encoding)


def pack_layers(model: ModelSites, encoding: Encoding, which: set[int]) -> ModelSites:
    """Return a model of which some dense layers are packed."""

    def pack(layer: LayerSites) -> LayerSites:
        qkv, output = packed(layer.qkv, encoding), packed(layer.output, encoding)
        dense = None if layer.dense is None else tuple(packed(matrix, encoding) for matrix in layer.dense)
        return replace(layer, qkv=qkv, output=output, dense=dense)

    return replace(model, layers=[pack(one) if i in which else one for i, one in enumerate(model.layers)])


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b"])
def test_the_style_follows_the_number_of_rows(name: str) -> None:
    model = expected_sites(read_spec(_CONFIGS / name), 16)
    styles = {rows: plan(model, rows).norms for rows in (1, 2, 3, 16, 64, 65, 128, 129, 256)}
    assert [rows for rows, style in styles.items() if style is NormStyle.READER] == [1, 2]
    assert [rows for rows, style in styles.items() if style is NormStyle.WRITER] == [3, 16, 64, 65, 128]
    assert plan(model, 129).refused[1].endswith("(more than 128 rows)")


@pytest.mark.parametrize("many", ["GEMM of few rows", "decode GEMM"])
def test_ranks_take_kernels_of_few_rows_without_norms(many: str) -> None:
    scheme = FP8_ROWS if many == "decode GEMM" else None
    first, _ = replace(read_spec(_CONFIGS / "llama-3-8b"), quantization=scheme).split(2)
    plans = {rows: plan(expected_sites(first, 16), rows) for rows in (1, 2, 8, 32, 512)}
    kernels = {
        rows: {name: one.kernel for name, one in found.layers[0].choices.items()} for rows, found in plans.items()
    }
    assert {kernels[1][name] for name in ("qkv", "o_proj", "down")} == {"GEMV"}
    assert (kernels[2]["qkv"] == "GEMV") == (scheme is None)
    assert {kernels[rows][name] for rows in (8, 32) for name in ("qkv", "o_proj", "down")} == {many}
    assert [kernels[rows]["gate_up"] for rows in (1, 8)] == ["GEMV with SiLU", "GEMM of few rows with SiLU"]
    assert not any("few rows" in name or "GEMV" in name for name in kernels[512].values())
    assert {found.norms for found in plans.values()} == {NormStyle.KERNEL}
    assert plans[8].head.kernel == "GEMM of few rows"


def test_each_encoding_has_its_own_bounds() -> None:
    plain = expected_sites(DENSE, 16)
    for encoding, most_readers, most_writers in ((FP8_ROW, 0, 64), (FP8_BLOCK, 0, 64), (INT4, 2, 128)):
        model = pack_layers(plain, encoding, {0, 1, 2})
        found = [plan(model, rows).norms for rows in (1, 2, 3, 64, 65, 128, 129)]
        expected = [
            NormStyle.READER if rows <= most_readers else NormStyle.WRITER if rows <= most_writers else NormStyle.KERNEL
            for rows in (1, 2, 3, 64, 65, 128, 129)
        ]
        assert found == expected, encoding


@pytest.mark.parametrize("which", [{0}, {1}, {2}, {0, 1, 2}], ids=str)
def test_a_packed_layer_among_others_takes_no_gemms_in_steps_with_prompts(which: set[int]) -> None:
    plain = expected_sites(DENSE, 16)
    assert plan(plain, 4, tokens=16).norms is NormStyle.WRITER
    assert plan(plain, 4, tokens=MAX_MIXED_TOKENS + 1).norms is NormStyle.KERNEL
    mixed = pack_layers(plain, INT4, which)
    assert plan(mixed, 4, tokens=16).norms is NormStyle.KERNEL
    decoding = plan(mixed, 24)  # rows that weights of 16 bits alone are padded to: all layers pad alike
    assert decoding.norms is NormStyle.WRITER and decoding.padded == 32
    assert {index for index, layer in enumerate(decoding.layers) if layer.qkv.kernel != "gemm"} == which


def test_4_bits_in_some_layers_are_not_4_bits_throughout() -> None:
    """With 4 bits throughout, 3 rows with prompts beside nothing else take GEMVs."""
    plain = replace(expected_sites(DENSE, 16))
    assert plan(pack_layers(plain, INT4, {0, 1, 2}), 2).norms is NormStyle.READER
    assert plan(pack_layers(plain, INT4, {0}), 2).norms is NormStyle.READER  # not all read hi/lo FP8
    assert plan(pack_layers(plain, INT4, {0}), 3).norms is NormStyle.WRITER


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"norms": "after"}, "norms"),
        ({"residual_scale": 0.5}, "residual_scale"),
        ({"mlp": DenseMlp(size=1024, activation="gelu_tanh")}, "activation"),
        ({"mlp": replace(MIXTURE, biases=True)}, "biases"),
        ({"mixer": make_attention(8, 2, 64, window=9)}, "window"),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_styles_of_few_rows_are_asked_for_each_layer(change: dict[str, object], reason: str, place: int) -> None:
    layers = tuple(replace(layer, **change) if i == place else layer for i, layer in enumerate(DENSE.layers))
    found = plan(expected_sites(replace(DENSE, layers=layers), 16), 8)
    assert (found.norms is NormStyle.WRITER) == (not reason)
    assert not reason or found.refused[1].endswith(f"({reason})")
    # A window costs the layer that has it its attention, and the others their style.
    assert [layer.attend.kernel == PAGED_ATTENTION for layer in found.layers] == [
        i == place and "mixer" in change for i in range(3)
    ]


def test_options_of_the_model_and_files_in_gguf_take_norms_by_kernels() -> None:
    assert plan(expected_sites(replace(DENSE, logits_softcap=3.0), 16), 8).norms is NormStyle.KERNEL
    assert plan(expected_sites(replace(DENSE, tie_embeddings=True), 16), 8).norms is NormStyle.WRITER
    model = expected_sites(DENSE, 16)
    kept = replace(model, embedding=Matrix(model.embedding.n, model.embedding.k, Layout.GGUF, None))
    assert plan(kept, 8).refused[1].endswith("(matrices of a GGUF file)")


def test_experts_are_streamed_for_few_rows_and_grouped_for_more() -> None:
    model = expected_sites(read_spec(_CONFIGS / "qwen3-30b-a3b"), 16)
    kernels = {rows: plan(model, rows).layers[0].experts for rows in (1, 2, 4, 8, 16, 64, 128)}
    assert [rows for rows, one in kernels.items() if one is not None and one.kernel == STREAMED] == [1, 2, 4, 8]
    assert [rows for rows, one in kernels.items() if one is not None and one.kernel == PERMUTED] == [16, 64, 128]
    assert kernels[16] is not None and "more than 8 rows others are faster" in kernels[16].refused[0]


def test_8_experts_cannot_be_streamed_and_are_grouped_for_any_rows() -> None:
    spec = read_spec(_CONFIGS / "qwen3-30b-a3b")
    assert spec.mixture is not None
    few = replace(spec.mixture, experts=8)
    model = expected_sites(spec.with_layers(lambda layer: replace(layer, mlp=few)), 16)
    for rows in (1, 2, 3, 8, 64):
        found = plan(model, rows)
        assert found.norms is NormStyle.WRITER and found.layers[0].experts is not None
        assert found.layers[0].experts.kernel == PERMUTED


def test_experts_with_adapters_of_their_own_take_the_kernel_that_adds_updates() -> None:
    model, bucket = expected_sites(read_spec(_CONFIGS / "qwen3-30b-a3b"), 16), Bucket(16, 16, True, adapters=True)
    found = plan_step(GpuDevice(), model, bucket)
    assert found.norms is NormStyle.KERNEL and found.layers[0].experts is not None
    assert found.layers[0].experts.kernel == GATHERED


def test_products_of_prompts_take_the_first_kernel_that_does_not_refuse() -> None:
    device = GpuDevice()
    names = {
        (encoding, rows): choose_matmul(device, Matrix(4096, 4096, Layout.UNITS, encoding), rows).kernel
        for encoding in (FP8_ROW, FP8_BLOCK, INT4)
        for rows in (32, 33, 64, 65, 80, 96, 97, 2048, 2049)
    }
    few, blocks, deq = "decode GEMM", "cuBLAS FP8, scales of blocks", "dequantize, then cuBLAS"
    assert [names[FP8_ROW, rows] for rows in (32, 33)] == [few, "cuBLAS FP8, scales of rows"]
    assert [names[FP8_BLOCK, rows] for rows in (64, 65, 80)] == [few, deq, blocks]  # whose rows come by 16
    assert [names[INT4, rows] for rows in (96, 97, 2048, 2049)] == [few, "prefill GEMM", "prefill GEMM", deq]
    gated = Matrix(8192, 4096, Layout.UNITS, INT4)
    assert choose_gated(device, gated, 96, "silu").kernel == few
    assert choose_gated(device, gated, 97, "silu").kernel == "prefill GEMM with SiLU"
    assert choose_gated(device, gated, 97, "gelu_tanh").kernel == "prefill GEMM"
    plain = Matrix(8192, 4096, Layout.ROWS, BF16)
    assert [choose_gated(device, plain, rows, "silu").kernel for rows in (64, 65, 256, 257)] == [
        "cuBLAS", "fused gate-up GEMM", "fused gate-up GEMM", "cuBLAS",
    ]  # fmt: skip


def test_another_gpu_takes_what_runs_there() -> None:
    with supposing("a100"):
        found = plan(expected_sites(read_spec(_CONFIGS / "llama-3-8b"), 16), 8)
    assert found.norms is NormStyle.KERNEL and found.layers[0].qkv.kernel == "cuBLAS"
    assert all("no Hopper" in reason for reason in found.refused)
    assert found.layers[0].attend.refused == ("decode attention (no Hopper)",)


def test_heads_that_no_attention_takes_are_refused() -> None:
    wide = make_spec("gemma4_text", make_attention(8, 2, 528), DenseMlp(size=1024), num_layers=2)
    for rows, tokens in ((1, 0), (4, 64)):
        with pytest.raises(ConfigError, match=r"No kernel .*: .*paged attention \(heads of 528\)"):
            plan(expected_sites(wide, 16), rows, tokens=tokens)
    assert plan(expected_sites(make_spec("", make_attention(8, 2, 512), DenseMlp(size=1024), num_layers=2), 16), 4)


def test_a_gpu_refuses_heads_before_weights_are_read(tmp_path: Path) -> None:
    config = json.loads((_SHAPES / "gemma-4-31b" / "config.json").read_text())
    config["text_config"]["global_head_dim"] = 1024
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"paged attention does not take heads of 1024: use --device cpu"):
        load_model(ModelConfig(model=str(tmp_path), load_format="dummy"), torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-26b-a4b", "gemma-4-e2b"])
@pytest.mark.parametrize("fp8", [False, True])
def test_each_layer_of_gemma_4_has_kernels(name: str, fp8: bool) -> None:
    """Those of both shapes the paged attention, in tiles that fit the memory of an SM."""
    spec = read_spec(_SHAPES / name)
    for rows, tokens in ((1, 0), (32, 0), (32, 2048)):
        found = plan(expected_sites(spec, 16, fp8=fp8), rows, tokens=tokens)
        assert found.norms is NormStyle.KERNEL
        assert {layer.attend.kernel for layer in found.layers} == {PAGED_ATTENTION}
        attends = zip(spec.layers, found.layers, strict=True)
        shown = {attention_of(one).head_dim: layer.attend.config for one, layer in attends}
        prompts = "; prompts: 64 x 32" if tokens else ""
        assert shown[512] == f"16 x 32{prompts} (by rule)" and {*shown} == {256, 512}


@pytest.mark.parametrize(("fp8", "most"), [(False, 2), (True, 1)])
def test_recurrent_layers_and_shared_experts_take_gemvs_with_few_rows(*, fp8: bool, most: int) -> None:
    model = expected_sites(read_spec(_SHAPES / "qwen3.6-35b-a3b"), 16, fp8=fp8)
    assert [rows for rows in (1, 2, 3, 32) if plan(model, rows).norms is NormStyle.READER] == [1, 2][:most]
    recurrent, *_, attention = plan(model, 1).layers[:4]
    assert recurrent.attend.kernel == DELTA_DECODE and attention.attend.kernel == PAGED_ATTENTION
    assert recurrent.gates is not None and attention.gates is None
    for layer in (recurrent, attention):
        assert layer.gate_up is not None and layer.down is not None and layer.router is not None
        assert layer.experts is not None and layer.experts.kernel == STREAMED


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3.6-35b-a3b"])
def test_a_draft_layer_has_kernels_for_each_number_of_rows(name: str, *, fp8: bool) -> None:
    """Behind its attention, which the rows' guesses see to: an MLP, or experts that are gathered as of a prompt."""
    model = expected_sites(describe_mtp(read_spec(_SHAPES / name)), 16, fp8=fp8)
    for rows in (1, 2, 8, 128):
        found = plan_step(GpuDevice(), model, Bucket(rows, rows, decoding=False), whole=False)
        [layer] = found.layers
        assert found.norms is NormStyle.KERNEL and layer.attend.kernel == PAGED_ATTENTION and layer.gates is None
        assert layer.gate_up is not None and layer.down is not None
        assert (layer.experts and layer.experts.kernel) == (GATHERED if model.spec.mixture else None)


def test_recurrent_layers_with_4_bits_take_norms_by_kernels() -> None:
    model = expected_sites(read_spec(_SHAPES / "qwen3.6-35b-a3b"), 16)
    layers = [replace(layer, qkv=packed(layer.qkv, INT4)) for layer in model.layers]
    found = plan(replace(model, layers=layers), 1)
    assert found.norms is NormStyle.KERNEL and "(4 bits beside recurrent layers)" in found.refused[0]


@pytest.mark.parametrize("fp8", [False, True])
def test_each_layer_of_glm_4_7_flash_has_kernels(*, fp8: bool) -> None:
    """Queries are projected twice, the router reads float32, and experts are those of other models."""
    model = expected_sites(read_spec(_SHAPES / "glm-4.7-flash"), 16, fp8=fp8)
    for rows, tokens in ((1, 0), (32, 0), (32, 2048)):
        found = plan(model, rows, tokens=tokens)
        assert found.norms is NormStyle.KERNEL
        dense, mixture = found.layers[0], found.layers[1]
        assert dense.query is not None and mixture.query is not None and mixture.experts is not None
        kernel, others = (
            (EXPANDED, "from 399 queries of a row on 128 x 64; others: ") if tokens else (LATENT_ATTENTION, "")
        )
        prompts, narrow = ("; prompts: 64 x 64", "; prompts: 64 x 32") if tokens else ("", "")
        assert mixture.attend == Choice(kernel, f"{others}64 x 64{prompts} by warpgroups (by rule)")
        in_fp8 = plan(replace(model, kv_dtype="float8_e4m3fn"), rows, tokens=tokens).layers[1]
        assert in_fp8.attend == Choice(kernel, f"{others}32 x 32{narrow} (by rule)")
        assert (mixture.experts.kernel == PERMUTED) == (not tokens)
    assert model.layers[1].router == Matrix(64, 2048, Layout.ROWS, None, "float32")


@pytest.mark.parametrize(
    "changes", [{"score": "sigmoid"}, {"has_bias": True}, {"scale": 2.5}, {"groups": 2, "top_groups": 1}], ids=str
)
def test_fused_kernels_do_not_choose_by_other_scores(changes: dict[str, Any]) -> None:
    """They would ignore what they do not know."""
    attention = make_attention(32, 4, 128)
    plain = MoeMlp(experts=128, size=768, router=Router(top_k=8, renormalize=True))
    other = replace(plain, router=replace(plain.router, **changes))
    known, unknown = (
        expected_sites(make_spec("qwen3_moe", attention, mlp, num_layers=2, hidden_size=2048), 16)
        for mlp in (plain, other)
    )
    assert [plan(known, rows).norms for rows in (1, 16)] == [NormStyle.READER, NormStyle.WRITER]
    for rows in (1, 16):
        found = plan(unknown, rows)
        assert found.norms is NormStyle.KERNEL
        assert all(f"({next(iter(changes))})" in reason for reason in found.refused)


def test_sizes_that_latent_attention_does_not_take_are_refused(tmp_path: Path) -> None:
    config = json.loads((_SHAPES / "glm-4.7-flash" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 640}))
    with pytest.raises(ConfigError, match=r"does not take latents of 640 and 64: use --device cpu"):
        load_model(ModelConfig(model=str(tmp_path), load_format="dummy"), torch.device("cuda"), torch.bfloat16)
