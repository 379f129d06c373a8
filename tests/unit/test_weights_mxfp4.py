# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts, as gpt-oss has them, and experts packed for a GPU: the values of what the files hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import blink.models
from blink.cli import model_fit
from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.formats.base import plain
from blink.formats.experts import PackedExperts
from blink.formats.fp8 import FP8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.mxfp4 import Mxfp4Matrix, round_to_codes
from blink.formats.schemes import GROUP
from blink.formats.schemes import FormatId as ExpertFormat
from blink.models.decoder import Decoder
from blink.models.layer_weights import MoeWeights
from blink.models.weights import packed_loader
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from model_families import MXFP4, save_model
from quantized_checkpoints import write_checkpoints


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return load_model(ModelConfig(model=str(path), **options), torch.device("cpu"), dtype)


def experts(decoder: Decoder) -> list[Tensor]:
    """Return the experts' matrices of all layers."""
    found: list[Tensor] = []
    for layer in decoder.layers:
        assert isinstance(layer.mlp, MoeWeights)
        for part in (layer.mlp.gate_up, layer.mlp.down):
            found.append(part.dequantize(torch.float32) if isinstance(part, PackedExperts) else plain(part))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_equal_those_of_transformers_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (2, 64, 5, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.arange(2 * 64 * 5).remainder(255).to(torch.uint8).view(2, 64, 5)
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)
    for expert in range(2):
        found = Mxfp4Matrix.from_blocks(blocks[expert], exponents[expert]).dequantize(dtype).T
        torch.testing.assert_close(found, expected[expert], rtol=0, atol=0)
        assert torch.equal(found.signbit(), expected[expert].signbit())


def test_experts_of_a_directory_are_those_that_transformers_has(tmp_path: Path) -> None:
    model = save_model(MXFP4, tmp_path)
    found = experts(load(tmp_path))
    for index, layer in enumerate(model.model.layers):
        gates_and_ups = layer.mlp.experts.gate_up_proj.detach().transpose(1, 2)  # in turn
        assert torch.equal(found[2 * index], torch.cat([gates_and_ups[:, 0::2], gates_and_ups[:, 1::2]], 1))
        assert torch.equal(found[2 * index + 1], layer.mlp.experts.down_proj.detach().transpose(1, 2))


def draw_fp8() -> QuantizedMatrix:
    return QuantizedMatrix(torch.randn(24, 144).to(FP8), torch.rand(24, 2))


def draw_int4() -> QuantizedMatrix:
    size = (24, 256 // GROUP)
    zeros = torch.randint(0, 17, size, dtype=torch.uint8)
    return QuantizedMatrix(torch.randint(16, (24, 256), dtype=torch.uint8), torch.rand(size).half().float(), zeros)


def draw_mxfp4() -> Mxfp4Matrix:
    exponents = torch.randint(60, 180, (24, 5), dtype=torch.uint8)  # further apart than any model's
    return Mxfp4Matrix(torch.randint(16, (24, 160), dtype=torch.uint8), exponents)


@pytest.mark.parametrize(
    ("form", "draw"),
    [(ExpertFormat.FP8, draw_fp8), (ExpertFormat.INT4, draw_int4), (ExpertFormat.MXFP4, draw_mxfp4)],
    ids=["fp8", "int4", "mxfp4"],
)
def test_packed_experts_keep_their_values(
    form: ExpertFormat, draw: Callable[[], QuantizedMatrix | Mxfp4Matrix]
) -> None:
    torch.manual_seed(2)
    matrices = [[draw(), draw()] for _ in range(3)]
    expected = torch.stack([torch.cat([part.dequantize(torch.float32) for part in parts]) for parts in matrices])
    packed = PackedExperts.allocate(form, (3, 48, expected.shape[2]))
    packed.values.fill_(255)
    for expert, parts in enumerate(matrices):
        for place, part in enumerate(parts):
            packed.store(expert, slice(24 * place, 24 * place + 24), part)
    assert torch.equal(packed.dequantize(torch.float32), expected)


def test_the_nearest_number_of_4_bits_is_chosen() -> None:
    values = torch.tensor([0.0, 0.2, 0.3, -0.74, 0.76, 2.4, 2.5, -4.9, 5.1, 9.0])
    ones = torch.full((1, 1), 127, dtype=torch.uint8)
    codes = round_to_codes(torch.nn.functional.pad(values, (0, 22)))[None]
    found = Mxfp4Matrix(codes, ones).dequantize(torch.float32)[0, :10]
    assert found.tolist() == [0.0, 0.0, 0.5, -0.5, 1.0, 2.0, 3.0, -4.0, 6.0, 6.0]


@pytest.mark.parametrize("scheme", [MXFP4, "fp8-block", "awq", "gptq", "packed"])
def test_experts_packed_for_a_gpu_are_those_of_the_checkpoint(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "moe_intermediate_size": 128}
    config = {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2} | sizes
    path = tmp_path if scheme == MXFP4 else write_checkpoints(tmp_path, scheme, **config)[0]
    if scheme == MXFP4:
        save_model(scheme, path)
    expected = experts(load(path))
    monkeypatch.setattr(packed_loader, "_has_kernels", lambda _: True)
    packed = load(path)
    for layer in packed.layers:
        assert isinstance(layer.mlp, MoeWeights)
        assert isinstance(layer.mlp.gate_up, PackedExperts) and isinstance(layer.mlp.down, PackedExperts)
    for found, exact in zip(experts(packed), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)
    random = load(path, load_format="dummy")
    assert [part.shape for part in experts(random)] == [part.shape for part in expected]
    assert all(1e-3 < part.std() < 1 for part in experts(random))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gate_up_proj_blocks", torch.zeros(4, 192, 3, 16, dtype=torch.uint8), r"has shape \(4, 192, 3, 16\)"),
        ("down_proj_scales", torch.zeros(4, 64, 2, dtype=torch.uint8), r"has shape \(4, 64, 2\)"),
        ("down_proj_scales", None, "down_proj_scales' has shape None"),
        ("gate_up_proj_blocks", torch.zeros(4, 192, 2, 16), "has type torch.float32"),
        ("down_proj_blocks", None, "has no tensor .*down_proj'"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(tmp_path: Path, name: str, value: Tensor | None, message: str) -> None:
    save_model(MXFP4, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, key = load_file(file), f"model.layers.0.mlp.experts.{name}"
    if value is None:
        del tensors[key]
    else:
        tensors[key] = value
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_files_cut_anywhere_are_refused(tmp_path: Path) -> None:
    save_model(MXFP4, tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    for size in (0, 7, 900, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(ConfigError, match="not a readable safetensors file"):
            load(tmp_path)


def test_experts_of_4_bits_do_not_become_fp8(tmp_path: Path) -> None:
    save_model(MXFP4, tmp_path)
    with pytest.raises(ConfigError, match=r"has matrices of 4 bits \(MXFP4\) already"):
        load(tmp_path, quantization="fp8")


def test_columns_must_be_whole_groups(tmp_path: Path) -> None:
    save_model(MXFP4, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.gate_up_proj"
    blocks = {f"{name}_blocks": torch.zeros(4, 200, 2, 16, dtype=torch.uint8)}
    scales = {f"{name}_scales": torch.zeros(4, 200, 2, dtype=torch.uint8), f"{name}_bias": torch.zeros(4, 200)}
    save_file(load_file(file) | blocks | scales, file)
    with pytest.raises(ConfigError, match="must have whole groups of 32 columns"):
        load(tmp_path)


def test_doctor_counts_a_published_gpt_oss() -> None:
    spec = read_spec(Path(blink.models.__path__[0]) / "configs" / "gpt-oss-20b")
    plain = model_fit.count_weights(spec, 2, stays_quantized=False)
    assert plain.total == 2 * spec.num_parameters
    found = model_fit.count_weights(spec, 2, stays_quantized=True)
    assert plain.total - found.total == int(
        24 * 32 * 3 * 2880 * 2880 * (2 - 17 / 32)
    )  # a byte of scales for 32 columns
    assert "matrices in 4 bits (MXFP4), 4 of 32 experts per token" in model_fit._describe(spec)
