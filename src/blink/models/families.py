# SPDX-License-Identifier: Apache-2.0
"""The families of models that Blink runs: what sets each apart from the plain decoder. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blink.errors import ConfigError
from blink.models.spec import PLAIN, ModelOptions

NO_WINDOW, EVERY_LAYER = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What all models of one model_type share."""

    title: str
    gguf: str = ""  # its name in GGUF files; empty: not read from them
    options: ModelOptions = PLAIN  # what a config's values are added to
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])  # of values that files leave out
    window_period: int = NO_WINDOW  # where a window is set: EVERY_LAYER has it, or all but every n-th
    qk_norm: bool = False
    qkv_bias: bool = False  # whatever the config says
    is_fused: bool = False  # queries, keys and values in one tensor; gate and up in another
    experts: str = ""  # where a layer's experts are; empty: a dense MLP
    interleaved: bool = False  # in GGUF files the halves of each head of queries and keys are interleaved


_GEMMA_DEFAULTS: Mapping[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA = ModelOptions(norms="both", shifted_norms=True, activation="gelu_tanh")
_ROPE_THETA: Mapping[str, object] = {"rope_theta": 10000.0}
_MISTRAL_DEFAULTS: Mapping[str, object] = {"sliding_window": 4096, **_ROPE_THETA}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(title="Llama, SmolLM2", gguf="llama", interleaved=True, defaults=_ROPE_THETA),
    "qwen2": Family(title="Qwen 2, 2.5", gguf="qwen2", qkv_bias=True),
    "qwen3": Family(title="Qwen 3", gguf="qwen3", qk_norm=True),
    "qwen3_moe": Family(
        title="Qwen 3 MoE",
        gguf="qwen3moe",
        qk_norm=True,
        experts="mlp",
        window_period=EVERY_LAYER,
        defaults={"use_sliding_window": False},
    ),
    "mistral": Family(title="Mistral", window_period=EVERY_LAYER, defaults=_MISTRAL_DEFAULTS),
    "ministral": Family(title="Ministral", window_period=EVERY_LAYER, defaults=_MISTRAL_DEFAULTS),
    "mixtral": Family(
        title="Mixtral",
        interleaved=True,  # in files of the architecture llama
        experts="block_sparse_moe",
        window_period=EVERY_LAYER,
        defaults={"rope_theta": 1e6, "norm_topk_prob": True},
    ),
    "gemma2": Family(
        title="Gemma 2",
        gguf="gemma2",
        options=_GEMMA,
        window_period=2,
        defaults={
            **_GEMMA_DEFAULTS,
            **_ROPE_THETA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        title="Gemma 3 (text)",
        gguf="gemma3",
        options=_GEMMA,
        window_period=6,
        qk_norm=True,
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
    ),
    "phi3": Family(title="Phi-3, Phi-4", gguf="phi3", is_fused=True, window_period=EVERY_LAYER, defaults=_ROPE_THETA),
    "olmo2": Family(
        title="OLMo 2", gguf="olmo2", options=ModelOptions(norms="after", wide_qk_norm=True), defaults=_ROPE_THETA
    ),
    "granite": Family(title="Granite 3", gguf="granite", interleaved=True, defaults=_ROPE_THETA),
    "gpt_oss": Family(
        title="gpt-oss",
        options=ModelOptions(sinks=True, activation="clipped_silu", expert_biases=True),
        experts="mlp",
        window_period=2,
        defaults={
            "rope_theta": 150000.0,
            "attention_bias": True,
            "norm_topk_prob": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
}
# Other names of the same: the text part of models that see pictures too.
_TEXT_PARTS = {"gemma3": "gemma3_text"}


def find_architecture(model_type: str) -> str:
    """Return the name in FAMILIES of a config's model_type, which may be that of a model with more than text."""
    return _TEXT_PARTS.get(model_type, model_type)


def not_supported(place: str, shown: str) -> ConfigError:
    """Return the error for a model of another family."""
    known = ", ".join(FAMILIES)
    return ConfigError(f"{place}: model type {shown} is not supported; Blink runs {known}.")
