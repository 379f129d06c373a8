# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 3, the text of Qwen3-VL, and those with recurrent layers: Qwen3-Next, Qwen 3.5 and what follows it."""

from __future__ import annotations

from dataclasses import replace

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.models.cache_layout import CONV_WIDTH
from blink.models.families.base import EVERY_LAYER, ExpertNames, Family
from blink.models.layers import GatedDeltaNet, change_some
from blink.models.spec import ModelSpec

_RECURRENT_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25, "rope_theta": 10000.0, "norm_topk_prob": True}


def _add_recurrent_layers(spec: ModelSpec, config: Fields) -> ModelSpec:
    """Give attention its output gate, and put the gated delta rule in the place of attention in most layers."""
    config.require(config.flag("attn_output_gate", True), "attention without an output gate")
    width = config.integer("linear_conv_kernel_dim", CONV_WIDTH)
    config.require(width == CONV_WIDTH, f"a convolution of {width} inputs")
    kind = config.text("mamba_ssm_dtype", "float32")
    config.require(kind == "float32", f"a recurrent state in {show(kind)}")
    chosen = _find_recurrent_layers(config, spec.num_layers)
    return _replace_attention(
        spec,
        chosen,
        k_heads=config.integer("linear_num_key_heads", 16),
        v_heads=config.integer("linear_num_value_heads", 32),
        k_dim=config.integer("linear_key_head_dim", 128),
        v_dim=config.integer("linear_value_head_dim", 128),
    )


def _add_recurrent_layers_of_gguf(spec: ModelSpec, metadata: Fields) -> ModelSpec:
    width = metadata.integer("ssm.conv_kernel")
    metadata.require(width == CONV_WIDTH, f"a convolution of {width} inputs")
    v_heads, interval = metadata.integer("ssm.time_step_rank"), metadata.integer("full_attention_interval", 4)
    size = metadata.integer("ssm.inner_size")
    metadata.require(size % v_heads == 0, f"{v_heads} value heads of {size} numbers together")
    chosen = {layer for layer in range(spec.num_layers) if (layer + 1) % interval}
    return _replace_attention(
        spec,
        chosen,
        k_heads=metadata.integer("ssm.group_count"),
        v_heads=v_heads,
        k_dim=metadata.integer("ssm.state_size"),
        v_dim=size // v_heads,
    )


def _replace_attention(spec: ModelSpec, chosen: set[int], **sizes: int) -> ModelSpec:
    """Put the gated delta rule of some sizes in the place of attention in chosen layers, and gate the others'."""
    spec = spec.with_attention(lambda attention: replace(attention, output_gate=True))
    recurrent = GatedDeltaNet(**sizes)
    return replace(spec, layers=change_some(spec.layers, chosen, lambda layer: replace(layer, mixer=recurrent)))


def _find_recurrent_layers(config: Fields, num_layers: int) -> set[int]:
    if not config.has("layer_types"):
        interval = config.integer("full_attention_interval", 4)
        return {layer for layer in range(num_layers) if (layer + 1) % interval}
    kinds = config.texts("layer_types")
    known = {"linear_attention", "full_attention"}
    config.require({*kinds} <= known, f"a layer of a type in {show(sorted({*kinds}))}")
    if len(kinds) != num_layers:
        raise ConfigError(f"{config.place}: each layer must have a type in 'layer_types'; download the model again.")
    return {layer for layer, kind in enumerate(kinds) if kind == "linear_attention"}


FAMILIES = {
    "qwen2": Family(title="Qwen 2, 2.5", qkv_bias=True, gguf="qwen2", gguf_class="Qwen2ForCausalLM"),
    "qwen3": Family(
        title="Qwen 3", qk_norm="head", gguf="qwen3", gguf_class="Qwen3ForCausalLM", score_tokens=("no", "yes")
    ),
    "qwen3_moe": Family(
        title="Qwen 3 MoE",
        defaults={"use_sliding_window": False},
        qk_norm="head",
        window_period=EVERY_LAYER,
        experts=ExpertNames(),
        gguf="qwen3moe",
    ),
    # For text alone the three positions of a token are equal, so that mrope is plain rotation.
    "qwen3_vl_text": Family(
        title="Qwen3-VL (text)",
        defaults={"head_dim": 128, "rope_theta": 500000.0},
        also_known_as=("qwen3_vl",),
        qk_norm="head",
    ),
    "qwen3_vl_moe_text": Family(
        title="Qwen3-VL MoE (text)",
        defaults={"norm_topk_prob": True, "rope_theta": 500000.0},
        also_known_as=("qwen3_vl_moe",),
        qk_norm="head",
        experts=ExpertNames(fused="columns"),
    ),
    "qwen3_next": Family(
        title="Qwen3-Next",
        defaults=_RECURRENT_DEFAULTS,
        adapt_config=_add_recurrent_layers,
        qk_norm="head",
        shifted_norms=True,
        has_mtp=True,
        experts=ExpertNames(shared="shared_expert"),
        has_grouped_projections=True,
        gguf="qwen3next",
        adapt_gguf=_add_recurrent_layers_of_gguf,
    ),
    "qwen3_5_text": Family(
        title="Qwen 3.5, 3.6, 3.8 (text)",
        defaults=_RECURRENT_DEFAULTS,
        also_known_as=("qwen3_5",),
        adapt_config=_add_recurrent_layers,
        qk_norm="head",
        shifted_norms=True,
        has_mtp=True,
        gguf="qwen35",
        adapt_gguf=_add_recurrent_layers_of_gguf,
        has_tiled_heads=True,
    ),
    "qwen3_5_moe_text": Family(
        title="Qwen 3.5, 3.6 MoE (text)",
        defaults=_RECURRENT_DEFAULTS,
        also_known_as=("qwen3_5_moe",),
        adapt_config=_add_recurrent_layers,
        qk_norm="head",
        shifted_norms=True,
        has_mtp=True,
        experts=ExpertNames(fused="rows", shared="shared_expert"),
        gguf="qwen35moe",
        adapt_gguf=_add_recurrent_layers_of_gguf,
        has_tiled_heads=True,
    ),
}
