# SPDX-License-Identifier: Apache-2.0
"""Read a ModelSpec from the metadata of a GGUF file. Needs no torch."""

from __future__ import annotations

from typing import Any

from blink.errors import ConfigError
from blink.models.rope import LinearScaling, Rope
from blink.models.spec import ModelSpec
from blink.models.weights.gguf_file import GgufFile

# GGUF's names of the architectures that Blink runs.
_ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "phi3": "phi3"}
_EMBEDDING = "token_embd.weight"
_FREQUENCY_DIVISORS = "rope_freqs.weight"


def read_gguf_spec(file: GgufFile) -> ModelSpec:
    """Describe the model in a GGUF file.

    Raises:
        ConfigError: a value is missing, or the model needs something that Blink does not do.
    """
    metadata = _Metadata(file)
    num_heads = metadata.need("attention.head_count")
    hidden_size = metadata.need("embedding_length")
    head_dim = metadata.get("attention.key_length", hidden_size // num_heads)
    max_len = metadata.need("context_length")
    # Within its window, sliding-window attention is full attention; 0 means none.
    window = metadata.get("attention.sliding_window", 0) or max_len
    is_moe = metadata.architecture == "qwen3_moe"
    return ModelSpec(
        architecture=metadata.architecture,
        vocab_size=file.tensors[_EMBEDDING].shape[0],
        hidden_size=hidden_size,
        num_layers=metadata.need("block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=metadata.get("feed_forward_length", 0) if is_moe else metadata.need("feed_forward_length"),
        rms_norm_eps=metadata.need("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(metadata, head_dim),
        max_model_len=min(max_len, window),
        tie_embeddings="output.weight" not in file.tensors,
        qk_norm=metadata.architecture in ("qwen3", "qwen3_moe"),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        num_experts=metadata.need("expert_count") if is_moe else 0,
        experts_per_token=metadata.need("expert_used_count") if is_moe else 0,
        moe_intermediate_size=metadata.need("expert_feed_forward_length") if is_moe else 0,
        norm_topk_prob=is_moe,
    )


class _Metadata:
    """Access to the values under the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        name = file.metadata.get("general.architecture")
        if name not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ConfigError(f"{file.path}: architecture '{name}' is not supported; Blink runs {known}.")
        if _EMBEDDING not in file.tensors:
            raise ConfigError(f"{file.path}: tensor '{_EMBEDDING}' is missing; give a file of the whole model.")
        self.file = file
        self.architecture = _ARCHITECTURES[name]
        self._prefix = name
        if self.architecture == "llama" and self.get("expert_count", 0):
            raise ConfigError(f"{file.path}: Mixtral models are not supported; use another model.")

    def get(self, key: str, default: Any) -> Any:
        return self.file.metadata.get(f"{self._prefix}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise ConfigError(f"{self.file.path}: metadata '{self._prefix}.{key}' is missing; convert the model again.")
        return value


def _read_rope(metadata: _Metadata, head_dim: int) -> Rope:
    tensors = metadata.file.tensors
    kind = metadata.get("rope.scaling.type", "none")
    if kind not in ("none", "linear") or "rope_factors_long.weight" in tensors:
        raise ConfigError(f"{metadata.file.path}: this rotary scaling ({kind}) is not supported; use another model.")
    divisors: tuple[float, ...] = ()
    if _FREQUENCY_DIVISORS in tensors:
        divisors = tuple(metadata.file.read_tensor(_FREQUENCY_DIVISORS).tolist())
    return Rope(
        theta=metadata.get("rope.freq_base", 10000.0),
        rotary_dim=metadata.get("rope.dimension_count", head_dim),
        scaling=LinearScaling(factor=metadata.need("rope.scaling.factor")) if kind == "linear" else None,
        divisors=divisors,
    )
