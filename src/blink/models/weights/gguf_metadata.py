# SPDX-License-Identifier: Apache-2.0
"""Read a ModelSpec from the metadata of a GGUF file. Needs no torch."""

from __future__ import annotations

import dataclasses
import math

import gguf

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.models.families import EVERY_LAYER, FAMILIES, Family
from blink.models.rope import YARN_FACTORS, YARN_MIN_THETA, LinearScaling, Rope, yarn_divisors
from blink.models.spec import ModelOptions, ModelSpec
from blink.models.weights.gguf_file import GgufFile

_ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
_EMBEDDING = "token_embd.weight"
_FREQUENCY_DIVISORS = "rope_freqs.weight"
_SHORT_DIVISORS, _LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"
# The head sizes of Gemma's models say how their scores are scaled, but for the largest: the files do not.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
_GEMMA3_LOCAL_THETA = 10000.0


def read_gguf_spec(file: GgufFile) -> ModelSpec:
    """Describe the model in a GGUF file.

    Raises:
        ConfigError: a value is missing or wrong, or the model needs something that Blink does not do.
    """
    name = _read_name(file)
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{file.path}: architecture {show(name)} is not supported; Blink runs {known}.")
    if _EMBEDDING not in file.tensors:
        raise ConfigError(f"{file.path}: tensor '{_EMBEDDING}' is missing; give a file of the whole model.")
    metadata = Fields(file.metadata, str(file.path), f"{name}.")
    return _make_spec(file, metadata, _ARCHITECTURES[name])


def find_gguf_arch(file: GgufFile) -> gguf.MODEL_ARCH:
    """Return the gguf package's name of a file's architecture, which read_gguf_spec has found."""
    name = _read_name(file)
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _read_name(file: GgufFile) -> str:
    return Fields(file.metadata, str(file.path)).text("general.architecture")


def _make_spec(file: GgufFile, metadata: Fields, architecture: str) -> ModelSpec:
    family = FAMILIES[architecture]
    num_experts = metadata.integer("expert_count", 0, low=0)
    if architecture == "llama" and num_experts:
        architecture, family = "mixtral", FAMILIES["mixtral"]
    metadata.require(bool(family.experts) or not num_experts, "a mixture of experts")
    num_heads = metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden_size // num_heads)
    size = metadata.integer("feed_forward_length", 0 if num_experts else None, low=0 if num_experts else 1)
    num_layers = metadata.integer("block_count")
    # The names of all layers are made beforehand.
    metadata.require(num_layers <= len(file.tensors), f"a model of {num_layers} layers with fewer tensors")
    options = _read_options(metadata, architecture, hidden_size, num_heads)
    return ModelSpec(
        architecture=architecture,
        vocab_size=file.tensors[_EMBEDDING].shape[0],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=metadata.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=size,
        rms_norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(file, metadata, head_dim),
        max_model_len=metadata.integer("context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        qk_norm=family.qk_norm,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        windows=_read_windows(metadata, family, num_layers),
        local_rope=Rope(theta=_GEMMA3_LOCAL_THETA, rotary_dim=head_dim) if architecture == "gemma3_text" else None,
        options=options,
        num_experts=num_experts,
        experts_per_token=metadata.integer("expert_used_count") if num_experts else 0,
        moe_intermediate_size=metadata.integer("expert_feed_forward_length", size or None) if num_experts else 0,
        norm_topk_prob=bool(num_experts),
    )


def _read_options(metadata: Fields, architecture: str, hidden_size: int, num_heads: int) -> ModelOptions:
    options = FAMILIES[architecture].options
    if architecture in _GEMMA_27B_LAYERS:
        is_largest = metadata.integer("block_count") == _GEMMA_27B_LAYERS[architecture]
        return dataclasses.replace(
            options,
            attention_scale=(hidden_size / num_heads) ** -0.5 if is_largest else None,
            attention_softcap=metadata.number("attn_logit_softcapping", 0.0),
            logits_softcap=metadata.number("final_logit_softcapping", 0.0),
            embedding_scale=math.sqrt(hidden_size),
        )
    if architecture == "granite":
        return dataclasses.replace(
            options,
            # 0 stands for what is not there.
            attention_scale=metadata.number("attention.scale", 0.0) or None,
            embedding_scale=metadata.number("embedding_scale", 0.0) or 1.0,
            residual_scale=metadata.number("residual_scale", 0.0) or 1.0,
            logits_divisor=metadata.number("logit_scale", 0.0) or 1.0,
        )
    return options


def _read_windows(metadata: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    window = metadata.integer("attention.sliding_window", 0, low=0)  # 0 means none
    if not window:
        return ()
    if family.window_period <= EVERY_LAYER:
        return (window,) * num_layers
    return tuple(window if (layer + 1) % family.window_period else 0 for layer in range(num_layers))


def _read_rope(file: GgufFile, metadata: Fields, head_dim: int) -> Rope:
    kind = metadata.text("rope.scaling.type", "none")
    metadata.require(kind in ("none", "linear", "yarn", "longrope"), f"rotary scaling {show(kind)}")
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    theta = metadata.number("rope.freq_base", 10000.0)
    if _LONG_DIVISORS in file.tensors:
        return Rope(
            theta=theta,
            rotary_dim=rotary_dim,
            divisors=_read_divisors(file, _SHORT_DIVISORS, rotary_dim),
            long_divisors=_read_divisors(file, _LONG_DIVISORS, rotary_dim),
            original_max_len=metadata.integer("rope.scaling.original_context_length"),
            magnitude=metadata.number("rope.scaling.attn_factor", 1.0),
        )
    if kind == "yarn":
        return _make_yarn_rope(metadata, theta, rotary_dim)
    return Rope(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling=LinearScaling(factor=metadata.number("rope.scaling.factor")) if kind == "linear" else None,
        divisors=_read_divisors(file, _FREQUENCY_DIVISORS, rotary_dim),
    )


def _make_yarn_rope(metadata: Fields, theta: float, rotary_dim: int) -> Rope:
    factor = metadata.number("rope.scaling.factor", low=YARN_FACTORS[0], high=YARN_FACTORS[1])
    metadata.require(
        theta >= YARN_MIN_THETA and rotary_dim <= 1 << 16, f"a rotation of {rotary_dim} components, base {theta:g}"
    )
    divisors = yarn_divisors(
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_len=metadata.integer("rope.scaling.original_context_length"),
        turns=(32.0, 1.0),
        truncate=True,
    )
    magnitude = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return Rope(theta=theta, rotary_dim=rotary_dim, divisors=divisors, magnitude=magnitude)


def _read_divisors(file: GgufFile, name: str, rotary_dim: int) -> tuple[float, ...]:
    if name not in file.tensors:
        return ()
    shape = file.tensors[name].shape
    if shape != (rotary_dim // 2,):
        raise ConfigError(
            f"{file.path}: '{name}' has shape {shape}, but the model's description asks for"
            f" {(rotary_dim // 2,)}; download or convert the model again."
        )
    return tuple(file.read_tensor(name).tolist())
