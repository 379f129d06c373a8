# SPDX-License-Identifier: Apache-2.0
"""Random weights in a GGUF file's formats, and the header that a benchmark writes for a config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from benchmark_programs import load_benchmark
from blink.config import ModelConfig
from blink.formats.base import QuantizedWeight
from blink.models.weights.dummy_gguf import draw_blocks
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from gguf_blocks import GPU_KINDS, Kind, dequantize

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2**-17,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize("kind", GPU_KINDS, ids=lambda kind: kind.name)
def test_random_blocks_are_near_other_random_weights(kind: Kind) -> None:
    blocks = draw_blocks(int(kind), 64, 1024, torch.Generator().manual_seed(1))
    values = dequantize(blocks.numpy(), kind)
    assert values.shape == (64, 1024)
    assert abs(float(values.mean())) < 3e-3
    assert 0.015 < float(values.std()) < 0.03


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file in Q4_K_M that has a header alone."""
    folder = tmp_path_factory.mktemp("header")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    size = load_benchmark("gguf_header").write_header(read_spec(folder), folder / "model.gguf", None)
    assert (folder / "model.gguf").stat().st_size == size
    return folder / "model.gguf"


def test_a_header_describes_the_model_of_its_config(header: Path) -> None:
    spec = read_spec(header)
    assert spec == replace(read_spec(header.parent), architecture=spec.architecture)
    kinds = {name: tensor.kind for name, tensor in GgufFile(header).tensors.items()}
    assert kinds["output.weight"] == kinds["blk.0.ffn_down_exps.weight"] == gguf.GGMLQuantizationType.Q6_K
    assert kinds["blk.1.ffn_down_exps.weight"] == kinds["blk.0.ffn_gate_exps.weight"] == gguf.GGMLQuantizationType.Q4_K
    assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.attn_norm.weight"] == gguf.GGMLQuantizationType.F32


def test_its_weights_are_random_in_its_formats_and_equal_for_equal_seeds(header: Path) -> None:
    config = ModelConfig(model=str(header), load_format="dummy", seed=3)
    first, second = (load_model(config, CPU, torch.float32) for _ in range(2))
    other = load_model(replace(config, seed=4), CPU, torch.float32)
    weights = [decoder.layers[5].qkv for decoder in (first, second, other)]
    assert all(isinstance(weight, QuantizedWeight) for weight in weights)
    values = [weight.dequantize() for weight in weights if isinstance(weight, QuantizedWeight)]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])
    stored = sum(tensor.num_bytes for tensor in GgufFile(header).tensors.values())
    assert first.num_weight_bytes < 1.01 * stored


def test_with_a_type_of_its_own_all_matrices_become_plain(header: Path) -> None:
    config = ModelConfig(model=str(header), load_format="dummy", dtype="float32")
    assert isinstance(load_model(config, CPU, torch.float32).layers[0].qkv, torch.Tensor)
