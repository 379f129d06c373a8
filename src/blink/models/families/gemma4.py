# SPDX-License-Identifier: Apache-2.0
"""Gemma 4: larger heads in layers without a window, keys and values that layers share, per-layer embeddings, and
experts next to the MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from blink.errors import ConfigError
from blink.fields import Fields
from blink.models.families.base import ExpertNames, Family
from blink.models.layers import Attention, LayerSpec
from blink.models.mlps import DenseMlp, MoeMlp, Router
from blink.models.rope_json import read_rope
from blink.models.spec import LayerInputs, ModelSpec

_FULL = "full_attention"
_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262144,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Which layers read the keys and values of others."""

    kinds: list[str]
    first: int  # the first of them

    def source_of(self, index: int) -> int | None:
        """Return the last layer of the same kind that has its own; None: this one has."""
        if index < self.first:
            return None
        return max(other for other in range(self.first) if self.kinds[other] == self.kinds[index])


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    kinds = _read_kinds(config, spec.num_layers)
    sharing = _Sharing(kinds, spec.num_layers - config.integer("num_kv_shared_layers", 0, low=0))
    if sharing.first < 1 or {*kinds[: sharing.first]} != {*kinds}:
        raise ConfigError(f"{config.place}: no layer keeps what 'num_kv_shared_layers' share; download it again.")
    size = config.integer("hidden_size_per_layer_input", 0, low=0)
    rows = config.integer("vocab_size_per_layer_input", spec.vocab_size)
    config.require(not size or rows >= spec.vocab_size, "per-layer embeddings of some tokens only")
    inputs = LayerInputs(rows, size) if size else None
    found: dict[tuple[str, int | None], LayerSpec] = {}
    layers: list[LayerSpec] = []
    for index, layer in enumerate(spec.layers):
        key = kinds[index], sharing.source_of(index)
        if key not in found:
            found[key] = replace(
                layer,
                mixer=_adapt_attention(layer.mixer.attention, config, *key),
                mlp=_adapt_mlp(layer.mlp.size, config, shares=key[1] is not None),
                input_size=size,
                has_scale=True,
            )
        layers.append(found[key])
    return replace(
        spec,
        layers=tuple(layers),
        embedding_scale=math.sqrt(spec.hidden_size),
        logits_softcap=config.number("final_logit_softcapping", 0.0),
        layer_inputs=inputs,
    )


def _read_kinds(config: Fields, num_layers: int) -> list[str]:
    usual = ["sliding_attention" if (layer + 1) % 6 else _FULL for layer in range(num_layers)]
    kinds = config.texts("layer_types", usual)
    config.require(kinds[-1] == _FULL, "a last layer with a window")
    return kinds


def _adapt_attention(attention: Attention | None, config: Fields, kind: str, source: int | None) -> Attention:
    assert attention is not None
    attention = replace(attention, scale=1.0, value_norm=True, kv_source=source)
    if kind != _FULL:
        return attention
    sizes, equal = _read_full_sizes(config), config.flag("attention_k_eq_v")
    head_dim = sizes.integer("head_dim")
    return replace(
        attention,
        head_dim=head_dim,
        kv_heads=sizes.integer("num_key_value_heads", attention.kv_heads),
        rope=read_rope(config, head_dim),
        keys_as_values=equal,
    )


def _read_full_sizes(config: Fields) -> Fields:
    """Return what layers without a window have of their own, in the form of published files or of transformers 5."""
    if not config.has("per_layer_config"):
        own: dict[str, Any] = {"head_dim": config.integer("global_head_dim", 512)}
        if config.flag("attention_k_eq_v") and config.has("num_global_key_value_heads"):
            own["num_key_value_heads"] = config.integer("num_global_key_value_heads")
        return Fields(own, config.place)
    each = config.mapping("per_layer_config")
    layers = [Fields(each, config.place).mapping(name) for name in each]
    is_known = {*layers[0]} <= {"head_dim", "num_key_value_heads"}
    config.require(is_known and all(one == layers[0] for one in layers), "layers of more than two shapes")
    return Fields(layers[0], config.place)


def _adapt_mlp(size: int, config: Fields, *, shares: bool) -> DenseMlp | MoeMlp:
    if not config.flag("enable_moe_block"):
        wide = shares and config.flag("use_double_wide_mlp")
        return DenseMlp(size=2 * size if wide else size, activation="gelu_tanh")
    return MoeMlp(
        experts=config.integer("num_experts"),
        size=config.integer("moe_intermediate_size"),
        router=Router(top_k=config.integer("top_k_experts"), renormalize=True),
        activation="gelu_tanh",
        shared_size=size,
        is_beside=True,
    )


def _make_family(title: str, whole: str, defaults: Mapping[str, object]) -> Family:
    return Family(
        title=title,
        defaults={**_DEFAULTS, **defaults},
        also_known_as=(whole,),
        adapt_config=_adapt_config,
        norms="both",
        qk_norm="head",
        window_period=6,
        experts=ExpertNames(router="router.proj", fused="rows", are_beside=True),
    )


FAMILIES = {
    "gemma4_text": _make_family(
        "Gemma 4 (text)",
        "gemma4",
        {"sliding_window": 512, "max_position_embeddings": 131072, "hidden_size_per_layer_input": 256},
    ),
    "gemma4_unified_text": _make_family(
        "Gemma 4 12B (text)", "gemma4_unified", {"sliding_window": 1024, "max_position_embeddings": 262144}
    ),
}
