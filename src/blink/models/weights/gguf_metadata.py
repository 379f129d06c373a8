# SPDX-License-Identifier: Apache-2.0
"""Read a ModelSpec from the metadata of a GGUF file. Needs no torch."""

from __future__ import annotations

import math

import gguf

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.models.families import FAMILIES, GGUF_NAMES
from blink.models.families.base import EVERY_LAYER, Family
from blink.models.layers import Attention, LayerSpec, QkNorm, repeat_layer
from blink.models.mlps import DenseMlp, MoeMlp, Router
from blink.models.rope import YARN_FACTORS, YARN_MIN_THETA, LinearScaling, Rope, yarn_divisors
from blink.models.spec import ModelSpec
from blink.models.weights.gguf_file import GgufFile

_EMBEDDING = "token_embd.weight"
_FREQUENCY_DIVISORS = "rope_freqs.weight"
_SHORT_DIVISORS, _LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"


def read_gguf_spec(file: GgufFile) -> ModelSpec:
    """Describe the model in a GGUF file.

    Raises:
        ConfigError: a value is missing or wrong, or the model needs something that Blink does not do.
    """
    name = _read_name(file)
    if name not in GGUF_NAMES:
        known = ", ".join(GGUF_NAMES)
        raise ConfigError(f"{file.path}: architecture {show(name)} is not supported; Blink runs {known}.")
    if _EMBEDDING not in file.tensors:
        raise ConfigError(f"{file.path}: tensor '{_EMBEDDING}' is missing; give a file of the whole model.")
    metadata = Fields(file.metadata, str(file.path), f"{name}.")
    return _make_spec(file, metadata, GGUF_NAMES[name])


def find_gguf_arch(file: GgufFile) -> gguf.MODEL_ARCH:
    """Return the gguf package's name of a file's architecture, which read_gguf_spec has found."""
    name = _read_name(file)
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _read_name(file: GgufFile) -> str:
    return Fields(file.metadata, str(file.path)).text("general.architecture")


def _make_spec(file: GgufFile, metadata: Fields, architecture: str) -> ModelSpec:
    has_experts = metadata.integer("expert_count", 0, low=0) > 0
    if has_experts:
        architecture = FAMILIES[architecture].gguf_mixture or architecture
    if metadata.has("attention.sliding_window"):
        architecture = FAMILIES[architecture].gguf_windowed or architecture
    family = FAMILIES[architecture]
    metadata.require(family.experts is not None or not has_experts, "a mixture of experts")
    # Layers behind the others predict further tokens.
    num_layers = metadata.integer("block_count")
    num_layers -= metadata.integer("nextn_predict_layers", 0, low=0, high=num_layers - 1)
    # The names of all layers are made beforehand.
    metadata.require(num_layers <= len(file.tensors), f"a model of {num_layers} layers with fewer tensors")
    attention = _read_attention(file, metadata, family)
    layer = LayerSpec(
        mixer=attention,
        mlp=_read_mixture(metadata, family) if has_experts else DenseMlp(size=metadata.integer("feed_forward_length")),
        norms=family.norms,
    )
    theta, max_model_len = family.gguf_local_theta, metadata.integer("context_length")
    local_rope = Rope(theta=theta, rotary_dim=attention.head_dim) if theta else None
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=file.tensors[_EMBEDDING].shape[0],
        hidden_size=metadata.integer("embedding_length"),
        layers=repeat_layer(layer, _read_windows(metadata, family, num_layers), max_model_len, local_rope),
        rms_norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        max_model_len=max_model_len,
        tie_embeddings="output.weight" not in file.tensors,
    )
    return family.adapt_gguf(spec, metadata)


def _read_attention(file: GgufFile, metadata: Fields, family: Family) -> Attention:
    heads = metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", metadata.integer("embedding_length") // heads)
    return Attention(
        heads=heads,
        kv_heads=metadata.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope=_read_rope(file, metadata, head_dim),
        qk_norm=_read_qk_norm(file, family),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
    )


def _read_qk_norm(file: GgufFile, family: Family) -> QkNorm:
    """Return the family's norm of queries and keys, or of families in which some models have one, what the file has."""
    has_norm = family.qk_norm == "none" and "blk.0.attn_q_norm.weight" in file.tensors
    return "head" if has_norm else family.qk_norm


def _read_mixture(metadata: Fields, family: Family) -> MoeMlp:
    assert family.experts is not None
    size = metadata.integer("feed_forward_length", 0, low=0)
    size = metadata.integer("expert_feed_forward_length", size or None)
    shared_size = 0
    if family.experts.shared_count:
        shared_size = size * metadata.integer("expert_shared_count", 0, low=0)
    elif family.experts.shared:
        shared_size = metadata.integer("expert_shared_feed_forward_length")
    return MoeMlp(
        experts=metadata.integer("expert_count"),
        size=size,
        router=Router(top_k=metadata.integer("expert_used_count"), renormalize=True),
        shared_size=shared_size,
    )


def _read_windows(metadata: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Return each layer's window, 0 for none."""
    window = metadata.integer("attention.sliding_window", 0, low=0)  # 0 means none
    if not window:
        return (0,) * num_layers
    if has_window := metadata.flags("attention.sliding_window_pattern"):
        if len(has_window) < num_layers:
            raise ConfigError(f"{metadata.place}: each layer must have a window or none; convert the model again.")
        return tuple(window if has_window[layer] else 0 for layer in range(num_layers))
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
    growth, share = 0.1 * math.log(max(factor, 1.0)), metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
    magnitude = (growth + 1) / (share * growth + 1)
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
