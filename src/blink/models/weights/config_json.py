# SPDX-License-Identifier: Apache-2.0
"""Read a ModelSpec from the config.json of a Hugging Face model directory. Needs no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.formats.schemes import read_quantization
from blink.models.families import EVERY_LAYER, FAMILIES, NO_WINDOW, Family, find_architecture, not_supported
from blink.models.spec import Activation, ModelOptions, ModelSpec
from blink.models.weights.rope_json import read_local_rope, read_rope
from blink.models.weights.text_files import read_json

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MAX_LAYERS = 1 << 16  # of which a list is made


def read_config_json(directory: Path) -> ModelSpec:
    """Read config.json.

    Raises:
        ConfigError: the file is missing or malformed, or the model needs something that Blink does not do.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ConfigError(f"{path} is missing: MODEL must be a complete Hugging Face model directory.")
    values = read_json(path)
    model_type = Fields(values, str(path)).text("model_type")
    architecture = find_architecture(model_type)
    if architecture not in FAMILIES:
        raise not_supported(str(path), show(model_type))
    if architecture != model_type:
        values = {**values, **Fields(values, str(path)).mapping("text_config")}
    values = {**FAMILIES[architecture].defaults, **values}
    return _make_spec(Fields(values, str(path)), values, architecture)


def _make_spec(config: Fields, values: Mapping[str, Any], architecture: str) -> ModelSpec:
    family = FAMILIES[architecture]
    _check_supported(config)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    size = config.integer("intermediate_size")
    has_experts = bool(family.experts)
    has_bias = config.flag("attention_bias")
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=size,
        rms_norm_eps=config.number("rms_norm_eps"),
        rope=read_rope(config, values, head_dim),
        max_model_len=config.integer("max_position_embeddings"),
        tie_embeddings=config.flag("tie_word_embeddings"),
        qk_norm=family.qk_norm,
        attention_bias=family.qkv_bias or has_bias,
        output_bias=has_bias,
        windows=_read_windows(config, family),
        local_rope=read_local_rope(config, values, head_dim),
        options=_read_options(config, family, head_dim),
        num_experts=_read_num_experts(config) if has_experts else 0,
        experts_per_token=config.integer("num_experts_per_tok") if has_experts else 0,
        moe_intermediate_size=config.integer("moe_intermediate_size", size) if has_experts else 0,
        norm_topk_prob=has_experts and config.flag("norm_topk_prob"),
        quantization=read_quantization(config),
    )


def _read_num_experts(config: Fields) -> int:
    return config.integer("num_experts" if config.has("num_experts") else "num_local_experts")


def _check_supported(config: Fields) -> None:
    config.require(not config.flag("mlp_bias"), "mlp_bias")
    config.require(
        config.integer("decoder_sparse_step", 1) == 1 and not config.integers("mlp_only_layers", []),
        "a mix of dense and expert layers",
    )
    config.require(not config.flag("use_bidirectional_attention"), "attention to later tokens")


def _read_options(config: Fields, family: Family, head_dim: int) -> ModelOptions:
    """Add to a family's options what the config says of its own."""
    options = family.options
    if options.activation == "clipped_silu":
        limits = (config.number("swiglu_alpha"), config.number("swiglu_limit"))
        config.require(limits == (1.702, 7.0), f"swiglu_alpha and swiglu_limit of {limits}")
        return options
    key = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    name = config.text(key, "silu")
    config.require(name in _ACTIVATIONS, f"activation {show(name)}")
    options = dataclasses.replace(options, activation=_ACTIVATIONS[name])
    if options.shifted_norms:  # Gemma
        return dataclasses.replace(
            options,
            attention_scale=_unless_usual(config.number("query_pre_attn_scalar", low=1e-6) ** -0.5, head_dim),
            attention_softcap=config.number("attn_logit_softcapping", 0.0),
            logits_softcap=config.number("final_logit_softcapping", 0.0),
            embedding_scale=math.sqrt(config.integer("hidden_size")),
        )
    if family is FAMILIES["granite"]:
        return dataclasses.replace(
            options,
            attention_scale=_unless_usual(config.number("attention_multiplier", 1.0), head_dim),
            embedding_scale=config.number("embedding_multiplier", 1.0),
            residual_scale=config.number("residual_multiplier", 1.0),
            logits_divisor=config.number("logits_scaling", 1.0, low=1e-6),
        )
    return options


def _unless_usual(scale: float, head_dim: int) -> float | None:
    return None if math.isclose(scale, head_dim**-0.5) else scale


def _read_windows(config: Fields, family: Family) -> tuple[int, ...]:
    """Return each layer's window: by layer_types, else as the family has them."""
    num_layers = config.integer("num_hidden_layers", high=_MAX_LAYERS)
    if not config.has("sliding_window") or not config.flag("use_sliding_window", family.window_period != NO_WINDOW):
        return ()
    window = config.integer("sliding_window")
    if config.has("layer_types"):
        kinds = config.texts("layer_types")
        known = {"full_attention": 0, "sliding_attention": window}
        config.require(set(kinds) <= known.keys(), f"a layer of a type in {show(sorted(set(kinds)))}")
        return tuple(known[kind] for kind in kinds)
    if family.window_period == NO_WINDOW:
        first = config.integer("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if family.window_period == EVERY_LAYER:
        return (window,) * num_layers
    return tuple(window if (layer + 1) % family.window_period else 0 for layer in range(num_layers))
