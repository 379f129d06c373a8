# SPDX-License-Identifier: Apache-2.0
"""GGUF files written by the gguf package: metadata, tensors and names, against that package and safetensors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.gguf_header import read_gguf_metadata
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from gguf_conversion import convert
from model_driver import Driver

Kind = gguf.GGMLQuantizationType
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2**-17,  # GGUF stores it in float32
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 7,
}
RECURRENT: dict[str, Any] = {
    "num_hidden_layers": 4,  # the last of them attends
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
SHARED: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.125,
    "logits_scaling": 2.5,
}
ROUTED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
MODELS: dict[str, tuple[gguf.MODEL_ARCH, dict[str, Any]]] = {
    "llama": (gguf.MODEL_ARCH.LLAMA, {"tie_word_embeddings": True}),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, {"head_dim": 32}),
    "qwen3_moe": (
        gguf.MODEL_ARCH.QWEN3MOE,
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "phi3": (
        gguf.MODEL_ARCH.PHI3,
        {
            "sliding_window": 24,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
                "long_factor": [1.0, 2.5, 4.0, 5.5, 7.0, 8.5, 10.0, 11.5],
                "attention_factor": 1.25,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, {"rope_parameters": YARN}),
    "mixtral": (gguf.MODEL_ARCH.LLAMA, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (gguf.MODEL_ARCH.GEMMA2, {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}),
    "gemma3_text": (
        gguf.MODEL_ARCH.GEMMA3,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmo2": (gguf.MODEL_ARCH.OLMO2, {}),
    "olmo3": (
        gguf.MODEL_ARCH.OLMO2,
        {
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "smollm3": (gguf.MODEL_ARCH.SMOLLM3, {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "seed_oss": (gguf.MODEL_ARCH.SEED_OSS, {"head_dim": 32}),
    "ministral3": (
        gguf.MODEL_ARCH.MISTRAL3,
        {
            "head_dim": 32,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.125},
        },
    ),
    "ernie4_5": (gguf.MODEL_ARCH.ERNIE4_5, {"head_dim": 32, "tie_word_embeddings": True}),
    "granite": (gguf.MODEL_ARCH.GRANITE, GRANITE),
    "granitemoehybrid": (
        gguf.MODEL_ARCH.GRANITE,
        {
            **GRANITE,
            "shared_intermediate_size": 80,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "nope",
        },
    ),
    "glm4_moe": (
        gguf.MODEL_ARCH.GLM4_MOE,
        {**ROUTED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4_moe_lite": (
        gguf.MODEL_ARCH.DEEPSEEK2,
        {**LATENT, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "deepseek_v3": (
        gguf.MODEL_ARCH.DEEPSEEK2,
        {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v2": (
        gguf.MODEL_ARCH.DEEPSEEK2,
        {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "qwen3_next": (gguf.MODEL_ARCH.QWEN3NEXT, {**RECURRENT, **SHARED}),
    "qwen3_5_text": (gguf.MODEL_ARCH.QWEN35, RECURRENT),
    "qwen3_5_moe_text": (gguf.MODEL_ARCH.QWEN35MOE, {**RECURRENT, **SHARED}),
}


def save(model_type: str, path: Path) -> gguf.MODEL_ARCH:
    """Write a random model as a directory; return its architecture's name."""
    arch, options = MODELS[model_type]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **options}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):  # which start alike, or so large that all is forgotten
                weight.copy_(2 * torch.rand_like(weight) - 1)
            elif name.endswith(".bias"):  # which start at 0
                weight.copy_(torch.randn_like(weight))
        for name, weight in model.named_buffers():
            if name.endswith("correction_bias"):
                weight.copy_(torch.randn_like(weight))
    model.save_pretrained(path)
    return arch


def run(path: Path) -> tuple[torch.Tensor, list[list[int]]]:
    """Return a model's logits behind a prompt longer than its window and original context, and its continuation."""
    driver = Driver(load_model(ModelConfig(model=str(path)), torch.device("cpu"), torch.float32), max_len=64)
    driver.add([(7 * place * place + 3) % 90 for place in range(37)], 12)
    return driver.compute_logits(), driver.run()


@pytest.mark.parametrize(
    ("model_type", "variant"),
    [
        *((model_type, "") for model_type in MODELS),
        ("qwen3_next", "grouped"),
        ("qwen3_5_moe_text", "joined"),
        ("qwen3_5_text", "drafts"),
        ("deepseek_v3", "whole"),
    ],
)
def test_a_converted_model_gives_the_tokens_of_the_original(
    model_type: str, variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(31)
    arch, converted = save(model_type, tmp_path), tmp_path / "model.gguf"
    convert(tmp_path, converted, arch, read_spec(tmp_path), variant=variant)
    # As converters write what has no recurrent layers; what is computed as another.
    names = {"granitemoehybrid": "granite", "glm4_moe_lite": "deepseek_v3"}
    spec = read_spec(tmp_path)
    assert read_spec(converted) == replace(spec, architecture=names.get(model_type, spec.architecture))
    logits, tokens = run(tmp_path)
    with caplog.at_level("INFO", "blink.model"):
        found, continued = run(converted)
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    assert continued == tokens
    assert sum("draft layer" in message for message in caplog.messages) == (variant == "drafts")


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("llama", (Kind.Q8_0, Kind.Q4_1, Kind.Q4_0)),  # heads interleaved, each matrix in another format
        pytest.param("qwen2", (Kind.Q4_1,), marks=pytest.mark.long),  # biases
        # Joined matrices; one format that has no kernels.
        pytest.param("phi3", (Kind.Q4_0, Kind.Q5_0), marks=pytest.mark.long),
        ("mixtral", (Kind.Q8_0,)),  # experts
        ("deepseek_v3", (Kind.Q8_0,)),  # latent attention, whose rows are moved; experts of sigmoids
        ("qwen3_5_text", (Kind.Q8_0, Kind.Q4_0)),  # value heads of a whole block: their columns can be moved
        # Experts of 48 columns, which stay float32.
        pytest.param("qwen3_moe", (Kind.Q4_1,), marks=pytest.mark.long),
    ],
)
def test_weights_that_stay_quantised_give_the_tokens_of_dequantised_ones(
    model_type: str, kinds: tuple[Kind, ...], tmp_path: Path
) -> None:
    torch.manual_seed(36)
    arch, path = save(model_type, tmp_path), tmp_path / "model.gguf"
    convert(tmp_path, path, arch, read_spec(tmp_path), kinds)
    outputs: list[list[list[int]]] = []
    num_bytes: list[int] = []
    for dtype in ("auto", "float32"):
        decoder = load_model(ModelConfig(model=str(path), dtype=dtype), torch.device("cpu"), torch.float32)
        num_bytes.append(decoder.num_weight_bytes)
        driver = Driver(decoder, max_len=64)
        for length in (11, 3, 26):
            driver.add([(length * i + 5) % 90 for i in range(length)], 12)
        outputs.append(driver.run(max_chunk=7))
    assert outputs[0] == outputs[1]
    tensors = GgufFile(path).tensors
    assert num_bytes[1] == sum(4 * math.prod(tensor.shape) for name, tensor in tensors.items() if "rope" not in name)
    assert num_bytes[0] < 0.6 * num_bytes[1]


def write_tensors(path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "ü", "漢字"])
    writer.add_float32("some.float", 1.5)
    writer.add_bool("some.bool", True)
    writer.add_array("some.numbers", [3, -1, 4])
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_split_model_is_read_by_its_first_file(tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(size=(3, 2, 64)).astype(np.float32)
    paths = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for path, part, name in zip(paths, values, "abc", strict=True):
        write_tensors(path, {name: (part, Kind.F32)})
    file = GgufFile(paths[0])
    assert [file.read_tensor(name).tolist() for name in "abc"] == values.tolist()
    assert file.metadata["some.numbers"] == [3, -1, 4]
    with pytest.raises(ConfigError, match="give its first, m-00001-of-00003"):
        GgufFile(paths[1])
    write_tensors(paths[2], {"a": (values[0], Kind.F32)})
    with pytest.raises(ConfigError, match="'a' is in another part too"):
        GgufFile(paths[0])
    paths[2].unlink()
    with pytest.raises(ConfigError, match=r"m-00003-of-00003\.gguf is not beside it"):
        GgufFile(paths[0])


KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def test_tensors_equal_those_that_the_gguf_package_reads(tmp_path: Path) -> None:
    values = np.random.default_rng(32).standard_normal((3, 4, 64)).astype(np.float32)
    path = tmp_path / "some.gguf"
    write_tensors(path, {kind.name: (values, kind) for kind in KINDS})
    file = GgufFile(path)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        np.testing.assert_array_equal(file.read_tensor(tensor.name), expected)
        np.testing.assert_array_equal(file.read_tensor(tensor.name, 1), expected[1])
        np.testing.assert_allclose(expected, values, atol=0.4)


def test_metadata_equals_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    write_tensors(path, {"x": (np.ones((1, 32), np.float32), Kind.F32)})
    metadata = read_gguf_metadata(path)
    assert metadata["tokenizer.ggml.tokens"] == ["a", "ü", "漢字"]
    assert metadata["some.float"] == 1.5
    assert metadata["some.bool"] is True
    assert metadata["some.numbers"] == [3, -1, 4]
    others = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
    assert GgufFile(path).metadata == others, "weights need no vocabulary"
    assert GgufFile(path).tensors["x"].shape == (1, 32)


@pytest.mark.parametrize("length", [0, 3, 20, 150, -1])
def test_a_cut_off_file_is_refused_by_name(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.gguf"
    write_tensors(path, {"x": (np.ones((8, 32), np.float32), Kind.F32)})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigError, match=r"cut\.gguf .*download it again"):
        GgufFile(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is not a model " * 100)
    with pytest.raises(ConfigError, match="wrong magic"):
        GgufFile(path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.add_tensor("x", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="architecture 'bert' is not supported"):
        read_spec(tmp_path / "bert.gguf")


def test_a_file_without_embeddings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    write_tensors(path, {"x": (np.ones((1, 32), np.float32), Kind.F32)})
    with pytest.raises(ConfigError, match=r"vocabulary\.gguf: tensor 'token_embd\.weight' is missing"):
        read_spec(path)
