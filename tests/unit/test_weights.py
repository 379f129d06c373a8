# SPDX-License-Identifier: Apache-2.0
"""Loading: dummy weights, damaged directories and wrong options."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blink.config import FrontendConfig, ModelConfig
from blink.errors import ConfigError
from blink.models.decoder import Decoder
from blink.models.weights.loader import load_model, resolve_dtype
from blink.models.weights.target import WeightTarget
from blink.text.assets import load_assets
from model_driver import Driver
from model_mutations import memory_limit
from model_specs import attention_of

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write_config(directory: Path, **changes: Any) -> str:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(directory)


def save_model(directory: Path) -> str:
    torch.manual_seed(33)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    model.save_pretrained(directory, max_shard_size="40KB")
    return str(directory)


def generate(decoder: Decoder) -> list[list[int]]:
    driver = Driver(decoder, max_len=64)
    driver.add([3, 1, 4, 1, 5], 10)
    return driver.run()


def load_dummy(path: str, **options: Any) -> Decoder:
    return load_model(ModelConfig(model=path, load_format="dummy", **options), CPU, torch.float32)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_dummy_weights_need_only_a_config_and_follow_the_seed(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write_config(tmp_path, **changes)
    first, again, other = (generate(load_dummy(path, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model type 'mamba' is not supported; Blink runs llama, qwen2, qwen3, qwen3_moe"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization by 'hqq'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rotary scaling 'ntk'"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
    ],
)
def test_what_blink_does_not_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dummy(write_config(tmp_path, **changes))


def test_a_malformed_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as JSON"):
        load_dummy(str(tmp_path))


def test_a_directory_without_weights_asks_for_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors files.*--load-format dummy"):
        load_model(ModelConfig(model=write_config(tmp_path)), CPU, torch.float32)


def test_the_wrong_load_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no gguf weights"):
        load_model(ModelConfig(model=save_model(tmp_path), load_format="gguf"), CPU, torch.float32)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"lacks {shard.name}"):
        load_model(ModelConfig(model=path), CPU, torch.float32)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(ConfigError, match=f"{shard.name} is not a readable safetensors file"):
        load_model(ModelConfig(model=path), CPU, torch.float32)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    write_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"no tensor 'model\.layers\.2\.input_layernorm\.weight'"):
        load_model(ModelConfig(model=path), CPU, torch.float32)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    write_config(tmp_path, intermediate_size=128)
    with pytest.raises(ConfigError, match=r"gate_proj\.weight' has shape \(96, 64\).*asks for \(128, 64\)"):
        load_model(ModelConfig(model=path), CPU, torch.float32)


def test_the_length_may_be_lowered_but_not_raised(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    assert load_dummy(path).spec.max_model_len == 128
    assert load_dummy(path, max_model_len=50).spec.max_model_len == 50
    with pytest.raises(ConfigError, match="use at most 128"):
        load_dummy(path, max_model_len=129)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    spec = load_dummy(write_config(tmp_path, model_type="phi3", sliding_window=40)).spec
    assert spec.max_model_len == 128
    assert [attention_of(layer).window for layer in spec.layers] == [40] * spec.num_layers
    shorter = load_dummy(str(tmp_path), max_model_len=40).spec
    assert [attention_of(layer).window for layer in shorter.layers] == [0] * spec.num_layers
    switched_off = {"model_type": "qwen3", "sliding_window": 40, "use_sliding_window": False}
    assert not any(
        attention_of(layer).window for layer in load_dummy(write_config(tmp_path, **switched_off)).spec.layers
    )


def test_the_generation_config_says_where_texts_end_before_the_models_own(tmp_path: Path) -> None:
    config = FrontendConfig(model=ModelConfig(model=write_config(tmp_path, eos_token_id=5), skip_tokenizer_init=True))
    assert load_assets(config).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert load_assets(config).eos_token_ids == (7, 5)


def test_types_resolve_by_device_and_unknown_ones_are_refused() -> None:
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", CPU) == torch.float16
    with pytest.raises(ConfigError, match="int8"):
        resolve_dtype("int8", CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "'num_attention_heads' must be a whole number from 1"),
        ({"hidden_size": "64"}, "'hidden_size' must be a whole number from 1 to 2147483647, but is '64'"),
        ({"vocab_size": True}, "'vocab_size' must be a whole number"),
        ({"num_hidden_layers": 10**400}, "but is a number of very many digits"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a number"),
        ({"rope_theta": 10**400}, "'rope_theta' must be a number"),
        ({"rope_theta": 0.5}, "a base at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factors and divisors must be positive"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object, but is a list of 1"),
        ({"num_key_value_heads": 3}, "a multiple of the key-value heads"),
        ({"head_dim": 7}, "the size of a head must be even"),
        ({**EXPERTS, "num_experts_per_tok": 5}, "more experts than there are"),
        ({"max_position_embeddings": 2**31 - 1}, "give --max-model-len 2097152 or less"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dummy(write_config(tmp_path, **changes))


def test_a_description_is_read_from_ordinary_files_of_bounded_size(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_dummy(str(tmp_path))
    os.truncate(file, 33 << 20)
    with pytest.raises(ConfigError, match="more than the 33554432 that such a file may have"):
        load_dummy(str(tmp_path))


def test_a_tensor_that_the_files_lack_takes_no_memory(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    write_config(tmp_path, intermediate_size=2**31 - 1)
    with pytest.raises(ConfigError, match=r"asks for \(2147483647, 64\)"), memory_limit(1 << 30):
        load_model(ModelConfig(model=path), CPU, torch.float32)


def test_a_weight_that_memory_cannot_hold_says_how_much_is_free() -> None:
    with pytest.raises(ConfigError, match=r"shape \(1099511627776, 4096\): \d+\.\d GiB of memory are free"):
        WeightTarget(CPU, torch.float32, lambda _: None).allocate(1 << 40, 4096)
