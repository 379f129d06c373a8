# SPDX-License-Identifier: Apache-2.0
"""Read a ModelSpec from the metadata of a GGUF file. Needs no torch."""

from __future__ import annotations

from blink.errors import ConfigError
from blink.models.rope import LinearScaling, Rope
from blink.models.spec import ModelSpec
from blink.models.weights.fields import Fields, show
from blink.models.weights.gguf_file import GgufFile

# GGUF's names of the architectures that Blink runs.
_ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "phi3": "phi3"}
_EMBEDDING = "token_embd.weight"
_FREQUENCY_DIVISORS = "rope_freqs.weight"


def read_gguf_spec(file: GgufFile) -> ModelSpec:
    """Describe the model in a GGUF file.

    Raises:
        ConfigError: a value is missing or wrong, or the model needs something that Blink does not do.
    """
    name = Fields(file.metadata, str(file.path)).text("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{file.path}: architecture {show(name)} is not supported; Blink runs {known}.")
    if _EMBEDDING not in file.tensors:
        raise ConfigError(f"{file.path}: tensor '{_EMBEDDING}' is missing; give a file of the whole model.")
    metadata = Fields(file.metadata, str(file.path), f"{name}.")
    return _make_spec(file, metadata, _ARCHITECTURES[name])


def _make_spec(file: GgufFile, metadata: Fields, architecture: str) -> ModelSpec:
    is_moe = architecture == "qwen3_moe"
    metadata.require(is_moe or not metadata.integer("expert_count", 0, low=0), "a mixture of experts (Mixtral)")
    num_heads = metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden_size // num_heads)
    max_len = metadata.integer("context_length")
    # Within its window, sliding-window attention is full attention; 0 means none.
    window = metadata.integer("attention.sliding_window", 0, low=0) or max_len
    return ModelSpec(
        architecture=architecture,
        vocab_size=file.tensors[_EMBEDDING].shape[0],
        hidden_size=hidden_size,
        num_layers=metadata.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=metadata.integer("feed_forward_length", 0 if is_moe else None, low=0 if is_moe else 1),
        rms_norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(file, metadata, head_dim),
        max_model_len=min(max_len, window),
        tie_embeddings="output.weight" not in file.tensors,
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        num_experts=metadata.integer("expert_count") if is_moe else 0,
        experts_per_token=metadata.integer("expert_used_count") if is_moe else 0,
        moe_intermediate_size=metadata.integer("expert_feed_forward_length") if is_moe else 0,
        norm_topk_prob=is_moe,
    )


def _read_rope(file: GgufFile, metadata: Fields, head_dim: int) -> Rope:
    kind = metadata.text("rope.scaling.type", "none")
    if kind not in ("none", "linear") or "rope_factors_long.weight" in file.tensors:
        raise ConfigError(f"{file.path}: this rotary scaling ({show(kind)}) is not supported; use another model.")
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    return Rope(
        theta=metadata.number("rope.freq_base", 10000.0),
        rotary_dim=rotary_dim,
        scaling=LinearScaling(factor=metadata.number("rope.scaling.factor")) if kind == "linear" else None,
        divisors=_read_divisors(file, rotary_dim),
    )


def _read_divisors(file: GgufFile, rotary_dim: int) -> tuple[float, ...]:
    if _FREQUENCY_DIVISORS not in file.tensors:
        return ()
    shape = file.tensors[_FREQUENCY_DIVISORS].shape
    if shape != (rotary_dim // 2,):
        raise ConfigError(
            f"{file.path}: '{_FREQUENCY_DIVISORS}' has shape {shape}, but the model's description asks for"
            f" {(rotary_dim // 2,)}; download or convert the model again."
        )
    return tuple(file.read_tensor(_FREQUENCY_DIVISORS).tolist())
