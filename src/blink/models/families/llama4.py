# SPDX-License-Identifier: Apache-2.0
"""Llama 4: layers of chunked attention among those that rotate nothing, and one expert a token besides a shared one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from blink.errors import ConfigError
from blink.fields import Fields
from blink.models.families.base import ExpertNames, Family
from blink.models.layers import Attention, QueryGrowth, shorten_window
from blink.models.mlps import DenseMlp
from blink.models.rope import unrotated
from blink.models.spec import ModelSpec

_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class _Kinds:
    """What sets a layer apart."""

    rotates: bool
    is_chunked: bool
    has_experts: bool


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    config.require(not config.flag("attention_bias"), "attention_bias")
    layer = spec.layers[0]
    mixture, attention = layer.mlp.mixture, layer.mixer.attention
    assert mixture is not None and attention is not None
    experts = replace(
        mixture,
        router=replace(mixture.router, renormalize=True),
        shared_size=mixture.size,
        shared_gate=False,
        scales_inputs=True,
    )
    dense = DenseMlp(size=config.integer("intermediate_size_mlp"), activation=mixture.activation)
    kinds = _read_kinds(config, spec.num_layers)
    found = {
        kind: replace(
            layer,
            mixer=_make_attention(attention, kind, config, spec.max_model_len),
            mlp=experts if kind.has_experts else dense,
        )
        for kind in {*kinds}
    }
    return replace(spec, layers=tuple(found[kind] for kind in kinds))


def _make_attention(attention: Attention, kind: _Kinds, config: Fields, max_model_len: int) -> Attention:
    chunk = 0
    if kind.is_chunked and config.has("attention_chunk_size"):
        chunk = shorten_window(config.integer("attention_chunk_size"), max_model_len)
    if kind.rotates:
        return replace(attention, chunk=chunk, qk_norm="plain_head" if config.flag("use_qk_norm", True) else "none")
    growth = None
    if config.flag("attn_temperature_tuning", True):
        growth = QueryGrowth(config.number("attn_scale", 0.1), config.integer("floor_scale", 8192), offset=1)
    return replace(attention, chunk=chunk, rope=unrotated(attention.head_dim), query_growth=growth)


def _read_kinds(config: Fields, num_layers: int) -> list[_Kinds]:
    interval, step = config.integer("no_rope_layer_interval", 4), config.integer("interleave_moe_layer_step", 1)
    usual = [int((layer + 1) % interval > 0) for layer in range(num_layers)]
    rotates = config.integers("no_rope_layers", usual) or usual  # 1: the layer rotates, whatever the name says
    kinds = config.texts("layer_types", ["chunked_attention" if one else "full_attention" for one in rotates])
    if min(len(rotates), len(kinds)) < num_layers:
        raise ConfigError(f"{config.place}: 'no_rope_layers' and 'layer_types' must say of each layer what it is.")
    config.require({*kinds} <= {"chunked_attention", "full_attention"}, "a layer of another type")
    mixtures = {*config.integers("moe_layers", [*range(step - 1, num_layers, step)])}
    return [
        _Kinds(bool(rotates[layer]), kinds[layer] == "chunked_attention", layer in mixtures)
        for layer in range(num_layers)
    ]


FAMILIES = {
    "llama4_text": Family(
        title="Llama 4 (text)",
        defaults={
            "vocab_size": 202048,
            "head_dim": 128,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
        },
        also_known_as=("llama4",),
        config_names={"intermediate_size": "shared_expert_intermediate_size"},
        adapt_config=_adapt_config,
        tensor_names={f"mlp.{part}": f"feed_forward.{part}" for part in _PARTS},
        rotates_pairs=True,
        experts=ExpertNames(block="feed_forward", router="router", fused="columns", shared="shared_expert"),
    ),
}
