# SPDX-License-Identifier: Apache-2.0
"""ModelSpec: everything about a model that is not a weight. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from blink.errors import ConfigError
from blink.models.rope import Rope

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "phi3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Describe a decoder. `intermediate_size` is the dense MLP's, `moe_intermediate_size` each expert's."""

    architecture: str  # one of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    max_model_len: int
    tie_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    def check(self, place: str) -> None:
        """Check what the values must be to each other; `place` names the file that they come from.

        Raises:
            ConfigError: the model cannot be as it is described.
        """
        rules = {
            "the query heads must be a multiple of the key-value heads": self.num_heads % self.num_kv_heads == 0,
            "the size of a head must be even and at least 2": self.head_dim >= 2 and self.head_dim % 2 == 0,
            "the rotated part must be even and within the head": (
                2 <= self.rope.rotary_dim <= self.head_dim and self.rope.rotary_dim % 2 == 0
            ),
            "a token cannot have more experts than there are": self.experts_per_token <= self.num_experts,
            "the rotary base, factors and divisors must be positive, a base at least 1": self.rope.is_sound(),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ConfigError(f"{place}: {rule}; download or convert the model again.")

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or the values) of one token."""
        return self.num_kv_heads * self.head_dim

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int, int]:
        """Return the shape of the KV cache tensor; its second dimension is K, V."""
        return (self.num_layers, 2, num_blocks, block_size, self.num_kv_heads, self.head_dim)

    @property
    def num_parameters(self) -> int:
        """Number of weights, those of a tied embedding counted once."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size) + 2 * self.hidden_size
        if self.attention_bias:
            attention += self.q_size + 2 * self.kv_size + self.hidden_size
        if self.qk_norm:
            attention += 2 * self.head_dim
        if self.num_experts:
            mlp = self.num_experts * self.hidden_size * (3 * self.moe_intermediate_size + 1)
        else:
            mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings + self.hidden_size
