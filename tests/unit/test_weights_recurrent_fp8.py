# SPDX-License-Identifier: Apache-2.0
"""FP8 files of Qwen3-Next and Qwen 3.5 as published, experts in one tensor of all, and what of a model becomes FP8."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.fp8 import FP8, FP8_MAX, quantize_fp8
from blink.models.decoder import Decoder
from blink.models.weights.checkpoint import SafetensorsCheckpoint
from blink.models.weights.source import read_spec
from blink.quantize.config import QuantizeConfig
from blink.quantize.conversion import quantize
from model_driver import load, logits
from model_families import FAMILIES, SMALL, make_model
from quantized_checkpoints import SCHEMES

CPU = torch.device("cpu")
BLOCK = 128
# What else has two dimensions stays in 16 bits in the published files: gates, routers, embeddings and the output layer.
MATRICES = re.compile(r".*\.(q|k|v|o|out|gate|up|down|in_proj_qkv|in_proj_z|in_proj_qkvz)(_proj)?\.weight")
PLAIN = re.compile(r".*(mlp\.gate|shared_expert_gate)\.weight")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight(|_scale_inv)")
SIZES: dict[str, Any] = {"hidden_size": 192, "moe_intermediate_size": 128, "linear_value_head_dim": 64}


def write_model(path: Path, name: str, **changes: Any) -> dict[str, Tensor]:
    """Write a random model of a family, and return its weights."""
    torch.manual_seed(44)
    values = {**SMALL, **FAMILIES[name], **SIZES, **changes}
    make_model(values).save_pretrained(path)
    weights = {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}
    for file in path.glob("*.safetensors*"):
        file.unlink()
    return weights


def write_weights(path: Path, weights: dict[str, Tensor], **config: Any) -> None:
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | config))
    save_file({name: value.contiguous() for name, value in weights.items()}, path / "model.safetensors")


def is_published_fp8(name: str) -> bool:
    return MATRICES.fullmatch(name) is not None and PLAIN.fullmatch(name) is None and ".visual." not in name


def round_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8, and the scales of its blocks."""
    rows, columns = weight.shape
    whole = functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / FP8_MAX
    values = (blocks / scales[:, None, :, None].clamp(min=1e-12)).flatten(2).flatten(0, 1)
    return values[:rows, :columns].to(FP8), scales


def restore(values: Tensor, scales: Tensor) -> Tensor:
    rows, columns = values.shape
    whole = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * whole


def fuse(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put what belongs to each expert into tensors of all, gates above ups, as transformers names them."""
    found = {name: value for name, value in weights.items() if EXPERT.fullmatch(name) is None}
    for prefix, ending in {(match[1], match[4]) for name in weights if (match := EXPERT.fullmatch(name))}:
        experts = range(sum(f"{prefix}.{expert}.up_proj.weight" in weights for expert in range(64)))
        gate, up, down = (
            torch.stack([weights[f"{prefix}.{expert}.{part}_proj.weight{ending}"] for expert in experts])
            for part in ("gate", "up", "down")
        )
        found |= {f"{prefix}.gate_up_proj{ending}": torch.cat((gate, up), 1), f"{prefix}.down_proj{ending}": down}
    return found


def write_published(folder: Path, name: str, *, fused: bool, **changes: Any) -> tuple[Path, Path]:
    """Write a model as published in FP8, and what it stands for."""
    exact, rounded = folder / "exact", folder / "rounded"
    weights = write_model(exact, name, **changes)
    rounded.mkdir()
    (rounded / "config.json").write_text((exact / "config.json").read_text())
    stored = dict(weights)
    for key in filter(is_published_fp8, weights):
        values, scales = round_blocks(weights[key])
        stored[key], stored[f"{key}_scale_inv"] = values, scales
        weights[key] = restore(values, scales)
    stored["mtp.fc.weight"] = torch.ones(4, 8).to(FP8)
    stored["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.ones(2, 4, 8)
    write_weights(exact, weights)
    scheme = SCHEMES["fp8-block"] | {"modules_to_not_convert": ["lm_head", "mtp.fc"]}
    write_weights(rounded, fuse(stored) if fused else stored, quantization_config=scheme)
    return rounded, exact


@pytest.mark.parametrize(
    ("name", "fused"), [("qwen3_next", False), ("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)]
)
def test_a_model_as_published_in_fp8_gives_the_logits_of_its_weights(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, fused: bool
) -> None:
    rounded, exact = write_published(tmp_path, name, fused=fused)
    with caplog.at_level("INFO", "blink.model"):
        found = logits(load(rounded))
    expected = logits(load(exact))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    [message] = [record.getMessage() for record in caplog.records if record.name == "blink.model"]
    assert message.startswith(f"{rounded}: the draft layer (MTP) of 2 tensors may be loaded by")


def test_blocks_that_gate_and_up_matrices_share_are_refused(tmp_path: Path) -> None:
    rounded, _ = write_published(tmp_path, "qwen3_5_moe", fused=True, moe_intermediate_size=192)
    weights = load_file(rounded / "model.safetensors")
    for name, value in weights.items():
        if name.endswith("gate_up_proj_scale_inv"):
            weights[name] = value[:, :3].contiguous()
    save_file(weights, rounded / "model.safetensors")
    with pytest.raises(ConfigError, match="blocks that gate and up matrices share"):
        load(rounded)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_experts_in_one_tensor_become_fp8_on_request(name: str, tmp_path: Path) -> None:
    """Published files have one tensor of all in these families; of Qwen3-VL it holds transposed matrices."""
    weights = write_model(tmp_path, name)
    if not any(key.endswith("experts.down_proj") for key in weights):
        weights = fuse(weights)
    elif name == "qwen3_vl_moe":
        weights = {key: value.mT if ".experts." in key else value for key, value in weights.items()}
    write_weights(tmp_path, weights)
    checkpoint = SafetensorsCheckpoint(tmp_path, read_spec(tmp_path))
    exact, rounded = experts_of(load(tmp_path)), experts_of(load(tmp_path, quantization="fp8"))
    for index, (before, after) in enumerate(zip(exact, rounded, strict=True)):
        name = f"model.layers.{index}.mlp.experts.3.down_proj.weight"
        stored = torch.empty(checkpoint.shape(name) or ())
        checkpoint.fill(name, stored)
        assert torch.equal(before.down[3], stored)
        for one, other in ((before.down[3], after.down[3]), (before.gate_up[3], after.gate_up[3])):
            assert torch.equal(other, quantize_fp8(one).dequantize(torch.float32))
            assert not torch.equal(other, one)


def test_quantize_rounds_experts_in_one_tensor(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    few = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 3}
    write_weights(plain, fuse(write_model(plain, "qwen3_5_moe", vocab_size=256, hidden_size=64, **few)))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(plain / "tokenizer.json"))
    found = quantize(str(plain), str(tmp_path / "found"), QuantizeConfig(format="fp8", num_calibration_tokens=128))
    stored = load_file(found / "model.safetensors")
    config = json.loads((found / "config.json").read_text())
    matrices = {name.removesuffix(".weight") for name, value in stored.items() if value.dtype == FP8}
    assert sum(".experts." in name for name in matrices) == config["num_hidden_layers"] * config["num_experts"] * 3
    layers = {
        name.removesuffix(".weight") for name, value in stored.items() if name.endswith(".weight") and value.ndim == 2
    }
    layers.remove("model.embed_tokens")
    assert {*config["quantization_config"]["ignore"]} == layers - matrices
    for exact, rounded in zip(experts_of(load(plain)), experts_of(load(found)), strict=True):
        difference = rounded.down[2] - exact.down[2]
        assert 1e-3 < difference.norm() / exact.down[2].norm() < 0.1


def experts_of(decoder: Decoder) -> list[Any]:
    """Return the experts of every layer."""
    return [layer.mlp for layer in decoder.layers]
