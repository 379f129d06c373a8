# SPDX-License-Identifier: Apache-2.0
"""Granite 3 and 4: four factors, of scores, embeddings, what layers add, and logits; and Mamba-2 layers."""

from __future__ import annotations

from dataclasses import replace

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.models.cache_layout import CONV_WIDTH
from blink.models.families.base import ExpertNames, Family
from blink.models.layers import remove_rope
from blink.models.mamba import Mamba2
from blink.models.mlps import DenseMlp, MoeMlp, Router
from blink.models.spec import ModelSpec

_ATTENTION, _RECURRENT = ("attention", "full_attention"), ("mamba", "linear_attention")


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    spec = spec.with_attention(lambda attention: attention.with_scale(config.number("attention_multiplier", 1.0)))
    residual_scale = config.number("residual_multiplier", 1.0)
    return replace(
        spec.with_layers(lambda layer: replace(layer, residual_scale=residual_scale)),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0, low=1e-6),
    )


def _adapt_hybrid(spec: ModelSpec, config: Fields) -> ModelSpec:
    position = config.text("position_embedding_type", "nope")
    config.require(position in ("rope", "nope"), f"a position embedding of type {show(position)}")
    spec = _adapt_config(spec, config)
    layer = replace(spec.layers[0], mlp=_read_mlp(spec, config))
    if position == "nope":
        layer = remove_rope(layer)
    kinds = config.texts("layer_types", ["linear_attention"] * spec.num_layers)
    unknown = sorted({*kinds} - {*_ATTENTION, *_RECURRENT})
    config.require(not unknown, f"a layer of type {show(unknown[0] if unknown else None)}")
    if len(kinds) < spec.num_layers:
        raise ConfigError(f"{config.place}: 'layer_types' must say of each layer what it is; download it again.")
    recurrent = replace(layer, mixer=_read_recurrence(spec, config)) if {*kinds} & {*_RECURRENT} else layer
    layers = (layer if kind in _ATTENTION else recurrent for kind in kinds[: spec.num_layers])
    return replace(spec, layers=tuple(layers))


def _read_mlp(spec: ModelSpec, config: Fields) -> DenseMlp | MoeMlp:
    activation = spec.layers[0].mlp.activation
    shared, experts = config.integer("shared_intermediate_size", 1024), config.integer("num_local_experts", 8, low=0)
    if not experts:
        return DenseMlp(size=shared, activation=activation)
    return MoeMlp(
        experts=experts,
        size=config.integer("intermediate_size"),
        router=Router(top_k=config.integer("num_experts_per_tok", 2), renormalize=True),
        activation=activation,
        shared_size=shared,
        shared_gate=False,
    )


def _read_recurrence(spec: ModelSpec, config: Fields) -> Mamba2:
    heads, width = config.integer("mamba_n_heads", 128), config.integer("mamba_d_conv", CONV_WIDTH)
    config.require(width == CONV_WIDTH, f"a convolution of {width} inputs")
    config.require(not config.flag("mamba_proj_bias"), "mamba_proj_bias")
    config.require(config.is_unbounded("time_step_limit"), "time_step_limit")
    size = config.integer("mamba_expand", 2) * spec.hidden_size
    if size % heads:
        raise ConfigError(f"{config.place}: recurrent layers have {size} channels, which {heads} heads do not share.")
    return Mamba2(
        heads=heads,
        head_dim=size // heads,
        groups=config.integer("mamba_n_groups", 1),
        state_size=config.integer("mamba_d_state", 256),
        conv_bias=config.flag("mamba_conv_bias", True),
    )


def _adapt_gguf(spec: ModelSpec, metadata: Fields) -> ModelSpec:
    # 0 stands for what is not there.
    scale, residual_scale = metadata.number("attention.scale", 0.0), metadata.number("residual_scale", 0.0)
    spec = spec.with_attention(lambda attention: replace(attention, scale=scale or None))
    if not metadata.flag("rope.scaling.finetuned", True):  # whether anything is rotated, whatever the name says
        spec = spec.with_layers(remove_rope)
    return replace(
        spec.with_layers(lambda layer: replace(layer, residual_scale=residual_scale or 1.0)),
        embedding_scale=metadata.number("embedding_scale", 0.0) or 1.0,
        logits_divisor=metadata.number("logit_scale", 0.0) or 1.0,
    )


FAMILIES = {
    "granite": Family(
        title="Granite 3",
        defaults={"rope_theta": 10000.0},
        adapt_config=_adapt_config,
        gguf="granite",
        is_interleaved=True,
        adapt_gguf=_adapt_gguf,
    ),
    "granitemoehybrid": Family(
        title="Granite 4",
        defaults={"rope_theta": 10000.0, "rms_norm_eps": 1e-6},
        adapt_config=_adapt_hybrid,
        is_gate_up_fused=True,
        tensor_names={"mlp.gate_up_proj": "shared_mlp.input_linear", "mlp.down_proj": "shared_mlp.output_linear"},
        recurrent_block="mamba",
        experts=ExpertNames(block="block_sparse_moe", router="router.layer", fused="rows", are_beside=True),
    ),
}
