# SPDX-License-Identifier: Apache-2.0
"""Read a ModelSpec from the config.json of a Hugging Face model directory. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blink.errors import ConfigError
from blink.models.rope import LinearScaling, Llama3Scaling, Rope
from blink.models.spec import ARCHITECTURES, ModelSpec


def read_config_json(directory: Path) -> ModelSpec:
    """Read config.json.

    Raises:
        ConfigError: the file is missing or malformed, or the model needs something that Blink does not do.
    """
    path = directory / "config.json"
    return _make_spec(_Config(_read_json(path), str(path)))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: MODEL must be a complete Hugging Face model directory.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return values


class _Config:
    """Checked access to the values of one file."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def need(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise ConfigError(f"{self.place}: '{key}' is missing.")
        return self.values[key]

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def require(self, condition: bool, what: str) -> None:
        if not condition:
            raise ConfigError(f"{self.place}: {what} is not supported; use another model.")


def _make_spec(config: _Config) -> ModelSpec:
    architecture = config.need("model_type")
    _check_supported(config, architecture)
    num_heads = config.need("num_attention_heads")
    head_dim = config.get("head_dim", config.need("hidden_size") // num_heads)
    is_moe = architecture == "qwen3_moe"
    num_experts = config.values.get("num_experts") or config.need("num_local_experts") if is_moe else 0
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.need("vocab_size"),
        hidden_size=config.need("hidden_size"),
        num_layers=config.need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=config.need("intermediate_size"),
        rms_norm_eps=config.need("rms_norm_eps"),
        rope=_read_rope(config, head_dim),
        max_model_len=_read_max_len(config, architecture),
        tie_embeddings=config.get("tie_word_embeddings", False),
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        attention_bias=config.get("attention_bias", False),
        num_experts=num_experts,
        experts_per_token=config.need("num_experts_per_tok") if is_moe else 0,
        moe_intermediate_size=config.need("moe_intermediate_size") if is_moe else 0,
        norm_topk_prob=is_moe and config.get("norm_topk_prob", False),
    )


def _check_supported(config: _Config, architecture: str) -> None:
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{config.place}: model type '{architecture}' is not supported; Blink runs {known}.")
    config.require(config.get("hidden_act", "silu") == "silu", f"activation '{config.values.get('hidden_act')}'")
    config.require(config.values.get("quantization_config") is None, "a quantized checkpoint (quantization_config)")
    config.require(not config.get("mlp_bias", False), "mlp_bias")
    config.require(
        config.get("decoder_sparse_step", 1) == 1 and not config.get("mlp_only_layers", []),
        "a mix of dense and expert layers",
    )


def _read_max_len(config: _Config, architecture: str) -> int:
    max_len: int = config.need("max_position_embeddings")
    # Within its window, sliding-window attention is full attention; Qwen 3 has a switch for it, Phi-3 has none.
    has_window = architecture == "phi3" or config.get("use_sliding_window", False)
    return min(max_len, config.get("sliding_window", max_len)) if has_window else max_len


def _read_rope(config: _Config, head_dim: int) -> Rope:
    """Read the rotary options: transformers 5 keeps them in rope_parameters, older versions all over the file."""
    values = config.get("rope_parameters", config.get("rope_scaling", {}))
    rope = _Config({**config.values, **values}, config.place)
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=rope.need("factor"),
            low_freq_factor=rope.need("low_freq_factor"),
            high_freq_factor=rope.need("high_freq_factor"),
            original_max_len=rope.need("original_max_position_embeddings"),
        )
    elif kind == "linear":
        scaling = LinearScaling(factor=rope.need("factor"))
    else:
        config.require(kind == "default", f"rotary scaling '{kind}'")
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    return Rope(theta=float(rope.need("rope_theta")), rotary_dim=rotary_dim, scaling=scaling)
