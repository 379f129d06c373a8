# SPDX-License-Identifier: Apache-2.0
"""OPT: learned positions, layer norms with biases, and MLPs without a gate."""

from __future__ import annotations

from dataclasses import replace

from blink.fields import Fields, show
from blink.models.families.base import Family
from blink.models.spec import ModelSpec, PositionTable

_OFFSET = 2  # rows of the table of positions before that of position 0


def _adapt_config(spec: ModelSpec, config: Fields) -> ModelSpec:
    name = config.text("activation_function", "relu")
    config.require(name == "relu", f"activation {show(name)}")
    config.require(config.flag("layer_norm_elementwise_affine", True), "a layer norm without weights")
    config.require(not config.flag("_remove_final_layer_norm"), "no norm behind the last layer")
    norms = "before" if config.flag("do_layer_norm_before", True) else "replacing"
    biases = config.flag("enable_bias", True)
    size = config.integer("word_embed_proj_dim", spec.hidden_size)
    return replace(
        spec.with_layers(
            lambda layer: replace(layer, norms=norms, norm_biases=True, mlp=replace(layer.mlp, biases=biases))
        ),
        positions=PositionTable(spec.max_model_len + _OFFSET, _OFFSET),
        embedding_size=0 if size == spec.hidden_size else size,
    )


FAMILIES = {
    "opt": Family(
        title="OPT",
        defaults={"rms_norm_eps": 1e-5, "attention_bias": True, "tie_word_embeddings": True},
        config_names={"ffn_dim": "intermediate_size", "enable_bias": "attention_bias"},
        adapt_config=_adapt_config,
        has_rope=False,
        activation="relu",
        tensor_names={
            "self_attn.o_proj": "self_attn.out_proj",
            "input_layernorm": "self_attn_layer_norm",
            "post_attention_layernorm": "final_layer_norm",
            "mlp.up_proj": "fc1",
            "mlp.down_proj": "fc2",
            "norm": "final_layer_norm",
        },
    ),
}
