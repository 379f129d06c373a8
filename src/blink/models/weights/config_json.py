# SPDX-License-Identifier: Apache-2.0
"""Read a ModelSpec from the config.json of a Hugging Face model directory. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blink.errors import ConfigError
from blink.models.rope import LinearScaling, Llama3Scaling, Rope
from blink.models.spec import ARCHITECTURES, ModelSpec
from blink.models.weights.fields import Fields, show
from blink.models.weights.text_files import read_json


def read_config_json(directory: Path) -> ModelSpec:
    """Read config.json.

    Raises:
        ConfigError: the file is missing or malformed, or the model needs something that Blink does not do.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ConfigError(f"{path} is missing: MODEL must be a complete Hugging Face model directory.")
    values = read_json(path)
    return _make_spec(Fields(values, str(path)), values)


def _make_spec(config: Fields, values: Mapping[str, Any]) -> ModelSpec:
    architecture = config.text("model_type")
    _check_supported(config, architecture)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    is_moe = architecture == "qwen3_moe"
    experts = "num_experts" if config.has("num_experts") else "num_local_experts"
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope=_read_rope(config, values, head_dim),
        max_model_len=_read_max_len(config, architecture),
        tie_embeddings=config.flag("tie_word_embeddings"),
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        attention_bias=config.flag("attention_bias"),
        num_experts=config.integer(experts) if is_moe else 0,
        experts_per_token=config.integer("num_experts_per_tok") if is_moe else 0,
        moe_intermediate_size=config.integer("moe_intermediate_size") if is_moe else 0,
        norm_topk_prob=is_moe and config.flag("norm_topk_prob"),
    )


def _check_supported(config: Fields, architecture: str) -> None:
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{config.place}: model type {show(architecture)} is not supported; Blink runs {known}.")
    activation = config.text("hidden_act", "silu")
    config.require(activation == "silu", f"activation {show(activation)}")
    config.require(not config.has("quantization_config"), "a quantized checkpoint (quantization_config)")
    config.require(not config.flag("mlp_bias"), "mlp_bias")
    config.require(
        config.integer("decoder_sparse_step", 1) == 1 and not config.integers("mlp_only_layers", []),
        "a mix of dense and expert layers",
    )


def _read_max_len(config: Fields, architecture: str) -> int:
    max_len = config.integer("max_position_embeddings")
    # Within its window, sliding-window attention is full attention; Qwen 3 has a switch for it, Phi-3 has none.
    has_window = architecture == "phi3" or config.flag("use_sliding_window")
    return min(max_len, config.integer("sliding_window", max_len)) if has_window else max_len


def _read_rope(config: Fields, values: Mapping[str, Any], head_dim: int) -> Rope:
    """Read the rotary options: transformers 5 keeps them in rope_parameters, older versions all over the file."""
    options = config.mapping("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    rope = Fields({**values, **options}, config.place)
    kind = rope.text("rope_type", rope.text("type", "default"))
    scaling = None
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_len=rope.integer("original_max_position_embeddings"),
        )
    elif kind == "linear":
        scaling = LinearScaling(factor=rope.number("factor"))
    else:
        config.require(kind == "default", f"rotary scaling {show(kind)}")
    rotary_dim = int(head_dim * min(rope.number("partial_rotary_factor", 1.0), 2.0))
    return Rope(theta=rope.number("rope_theta"), rotary_dim=rotary_dim, scaling=scaling)
