# SPDX-License-Identifier: Apache-2.0
"""Models that choose experts by scores of their own, in all layers but some: what several makers' families share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.models.layers import LayerSpec, change_some
from blink.models.mlps import DenseMlp
from blink.models.spec import ModelSpec

_SOFTMAX, _SIGMOID = 1, 2  # what GGUF files call scores


def set_router(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return a model whose layers choose experts otherwise, and whose shared expert has no gate."""

    def change(layer: LayerSpec) -> LayerSpec:
        mixture = layer.mlp.mixture
        assert mixture is not None
        router = replace(mixture.router, **changes)
        return replace(layer, mlp=replace(mixture, router=router, shared_gate=not mixture.shared_size))

    return spec.with_layers(change)


def set_sigmoid_router(spec: ModelSpec, config: Fields) -> ModelSpec:
    """Return a model whose layers choose by sigmoids and a bias, some groups first, as DeepSeek-V3's do."""
    for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        found = config.text(key, known)
        config.require(found == known, f"{key} {show(found)}")
    return set_router(
        spec,
        score="sigmoid",
        has_bias=True,
        scale=config.number("routed_scaling_factor", low=1e-6),
        **read_groups(config),
    )


def read_groups(config: Fields) -> dict[str, int]:
    """Read into how many groups experts are cut, and of how many a token has some."""
    groups = config.integer("n_group", 1)
    return {"groups": groups, "top_groups": config.integer("topk_group", 1)} if groups > 1 else {}


def set_gguf_router(spec: ModelSpec, metadata: Fields) -> ModelSpec:
    """Return a model of a GGUF file that says how its layers choose experts, and which first ones are dense."""
    kind = metadata.integer("expert_gating_func", _SOFTMAX)
    metadata.require(kind in (_SOFTMAX, _SIGMOID), f"expert_gating_func {kind}")
    is_sigmoid, groups = kind == _SIGMOID, metadata.integer("expert_group_count", 1)
    spec = set_router(
        spec,
        score="sigmoid" if is_sigmoid else "softmax",
        has_bias=is_sigmoid,
        renormalize=metadata.flag("expert_weights_norm"),
        scale=metadata.number("expert_weights_scale", 1.0, low=1e-6),
        groups=groups,
        top_groups=metadata.integer("expert_group_used_count", 1) if groups > 1 else 1,
        group_best=1 if groups > 1 and not is_sigmoid else 2,
    )
    count = metadata.integer("leading_dense_block_count", 0, low=0)
    dense = DenseMlp(size=metadata.integer("feed_forward_length"), activation=spec.layers[0].mlp.activation)
    first = range(min(count, spec.num_layers))
    return replace(spec, layers=change_some(spec.layers, first, lambda layer: replace(layer, mlp=dense)))


def make_dense(spec: ModelSpec, config: Fields, layers: Collection[int]) -> ModelSpec:
    """Return a model of which some layers have an MLP for all tokens."""
    mlp = DenseMlp(size=config.integer("intermediate_size"), activation=spec.layers[0].mlp.activation)
    return replace(spec, layers=change_some(spec.layers, layers, lambda layer: replace(layer, mlp=mlp)))


def make_first_dense(spec: ModelSpec, config: Fields, default: int) -> ModelSpec:
    """Return a model whose first layers have an MLP for all tokens."""
    step = config.integer("moe_layer_freq", 1)
    config.require(step == 1, f"experts in every {step}th layer")
    count = config.integer("first_k_dense_replace", default, low=0)
    return make_dense(spec, config, range(min(count, spec.num_layers)))


def make_listed_dense(spec: ModelSpec, config: Fields, default: int) -> ModelSpec:
    """Return a model of which a list may say which layers have an MLP for all tokens."""
    if not config.has("mlp_layer_types"):
        return make_first_dense(spec, config, default)
    kinds = config.texts("mlp_layer_types")
    config.require({*kinds} <= {"dense", "sparse"}, f"a layer of a type in {show(sorted({*kinds}))}")
    if len(kinds) != spec.num_layers:
        raise ConfigError(f"{config.place}: each layer must have a type in 'mlp_layer_types'; download it again.")
    return make_dense(spec, config, {index for index, kind in enumerate(kinds) if kind == "dense"})
