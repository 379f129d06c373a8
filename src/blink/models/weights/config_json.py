# SPDX-License-Identifier: Apache-2.0
"""Read a ModelSpec from the config.json of a Hugging Face model directory. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.formats.schemes import read_quantization
from blink.models.families import FAMILIES, find_architecture, not_supported
from blink.models.families.base import EVERY_LAYER, NO_WINDOW, ExpertNames, Family
from blink.models.layers import Attention, LayerSpec, change_some, repeat_layer
from blink.models.mlps import Activation, DenseMlp, MoeMlp, Router
from blink.models.rope import unrotated
from blink.models.rope_json import read_local_rope, read_query_growth, read_rope
from blink.models.spec import ModelSpec
from blink.models.weights.overrides import override
from blink.models.weights.shards import OUTPUT_NAMES, has_tensor
from blink.models.weights.text_files import read_json

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MAX_LAYERS = 1 << 16  # of which a list is made


def read_config_json(directory: Path, changes: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read config.json, parts of which `changes` replace.

    Raises:
        ConfigError: the file is missing or malformed, or the model needs something that Blink does not do.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ConfigError(f"{path} is missing: MODEL must be a complete Hugging Face model directory.")
    changes = changes or {}
    values = override(read_json(path), changes)
    model_type = Fields(values, str(path)).text("model_type")
    text = Fields(values, str(path)).mapping("text_config")
    architecture = find_architecture(model_type, Fields(text, str(path)).text("model_type", ""))
    if architecture not in FAMILIES:
        raise not_supported(str(path), show(model_type))
    if architecture != model_type:
        text = override(text, {key: changes[key] for key in changes if key != "text_config"})
        values = {**values, **text, **_settle_tie(directory, values, text)}
    family = FAMILIES[architecture]
    renamed = {name: values[own] for own, name in family.config_names.items() if values.get(own) is not None}
    values = {**family.defaults, **values, **renamed}
    return _make_spec(Fields(values, str(path)), values, architecture)


def _settle_tie(directory: Path, outer: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether the output layer is the embedding, where a model and its text part do not say the same."""
    key = "tie_word_embeddings"
    if outer.get(key) == text.get(key) or not any(directory.glob("*.safetensors")):
        return {}
    return {key: not has_tensor(directory, OUTPUT_NAMES)}


def _make_spec(config: Fields, values: Mapping[str, Any], architecture: str) -> ModelSpec:
    family = FAMILIES[architecture]
    _check_supported(config, values)
    layer, attention = _read_layer(config, family)
    windows, max_model_len = _read_windows(config, family), config.integer("max_position_embeddings")
    layers = repeat_layer(layer, windows, max_model_len, read_local_rope(config, attention.head_dim))
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=_put_dense_layers(config, family, layers),
        rms_norm_eps=config.number("rms_norm_eps"),
        max_model_len=max_model_len,
        tie_embeddings=config.flag("tie_word_embeddings"),
        quantization=read_quantization(config),
    )
    return family.adapt_config(spec, config)


def _read_layer(config: Fields, family: Family) -> tuple[LayerSpec, Attention]:
    """Read what all layers have, and the attention in it; windows and what belongs to them come later."""
    heads, has_bias = config.integer("num_attention_heads"), config.flag("attention_bias")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // heads)
    attention = Attention(
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=read_rope(config, head_dim) if family.has_rope else unrotated(head_dim),
        sinks=family.sinks,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or has_bias,
        output_bias=has_bias,
        query_growth=read_query_growth(config),
    )
    return LayerSpec(mixer=attention, mlp=_read_mlp(config, family), norms=family.norms), attention


def _read_mlp(config: Fields, family: Family) -> DenseMlp | MoeMlp:
    if family.experts is None or family.experts.are_beside:
        return _read_dense_mlp(config, family)
    own_size = config.has("moe_intermediate_size")
    size = config.integer("moe_intermediate_size" if own_size else "intermediate_size")
    return MoeMlp(
        experts=config.integer("num_experts" if config.has("num_experts") else "num_local_experts"),
        size=size,
        router=Router(top_k=config.integer("num_experts_per_tok"), renormalize=config.flag("norm_topk_prob")),
        activation=family.activation or _read_activation(config),
        biases=family.experts.are_joined,
        shared_size=_read_shared_size(config, family.experts, size),
    )


def _read_shared_size(config: Fields, names: ExpertNames, size: int) -> int:
    """Return the width of the expert that all tokens have; size: of the others."""
    if names.shared_count:
        return size * config.integer(names.shared_count, low=0)
    return config.integer(f"{names.shared}_intermediate_size") if names.shared else 0


def _read_dense_mlp(config: Fields, family: Family) -> DenseMlp:
    return DenseMlp(size=config.integer("intermediate_size"), activation=family.activation or _read_activation(config))


def _put_dense_layers(config: Fields, family: Family, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Give some layers of a model with experts a dense MLP: by `mlp_only_layers`, and all but every n-th."""
    if family.experts is None or family.experts.are_beside:
        return layers
    step, listed = config.integer("decoder_sparse_step", 1), {*config.integers("mlp_only_layers", [])}
    dense = [index for index in range(len(layers)) if index in listed or (index + 1) % step]
    if not dense:
        return layers
    mlp = _read_dense_mlp(config, family)
    return change_some(layers, {*dense}, lambda layer: replace(layer, mlp=mlp))


def _read_activation(config: Fields) -> Activation:
    name = config.text("hidden_activation" if config.has("hidden_activation") else "hidden_act", "silu")
    config.require(name in _ACTIVATIONS, f"activation {show(name)}")
    return _ACTIVATIONS[name]


def _check_supported(config: Fields, values: Mapping[str, Any]) -> None:
    config.require(not config.flag("mlp_bias"), "mlp_bias")
    # "vision": of pictures, which no text has.
    kind = values.get("use_bidirectional_attention")
    config.require(kind in (None, False, "vision"), "attention to later tokens")


def _read_windows(config: Fields, family: Family) -> tuple[int, ...]:
    """Return each layer's window, 0 for none: by layer_types, else as the family has them."""
    num_layers = config.integer("num_hidden_layers", high=_MAX_LAYERS)
    if not config.has("sliding_window") or not config.flag("use_sliding_window", family.window_period != NO_WINDOW):
        return (0,) * num_layers
    window = config.integer("sliding_window")
    if config.has("layer_types"):
        kinds = config.texts("layer_types")
        known = {"full_attention": 0, "sliding_attention": window}
        config.require(set(kinds) <= known.keys(), f"a layer of a type in {show(sorted(set(kinds)))}")
        if len(kinds) != num_layers:
            raise ConfigError(f"{config.place}: each layer must have a window or none; download the model again.")
        return tuple(known[kind] for kind in kinds)
    if family.window_period == NO_WINDOW:
        first = config.integer("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if family.window_period == EVERY_LAYER:
        return (window,) * num_layers
    return tuple(window if (layer + 1) % family.window_period else 0 for layer in range(num_layers))
