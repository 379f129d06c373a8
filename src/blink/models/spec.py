# SPDX-License-Identifier: Apache-2.0
"""ModelSpec: everything about a model that is not a weight. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blink.errors import ConfigError
from blink.formats.schemes import Quantization
from blink.models.rope import Rope

Activation = Literal["silu", "gelu_tanh", "clipped_silu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What some families add to the plain decoder; the defaults add nothing."""

    norms: Literal["before", "after", "both"] = "before"  # where attention and MLP are normalised
    shifted_norms: bool = False  # the checkpoint stores each norm's weight minus 1
    wide_qk_norm: bool = False  # one norm over all query heads, one over all key heads
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: as they are
    logits_softcap: float = 0.0
    sinks: bool = False  # each query head has a score that takes part in the softmax, but no value
    activation: Activation = "silu"
    expert_biases: bool = False  # of router and experts
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add to the residual
    logits_divisor: float = 1.0


PLAIN = ModelOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Describe a decoder. `intermediate_size` is the dense MLP's, `moe_intermediate_size` each expert's."""

    architecture: str  # Hugging Face's model_type, one of families.py
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
    attention_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of attention's output
    windows: tuple[int, ...] = ()  # each layer's sliding window in tokens, 0: none; empty: no layer has one
    local_rope: Rope | None = None  # of the layers with a window, where theirs differs
    options: ModelOptions = PLAIN
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    quantization: Quantization | None = None  # of the checkpoint's matrices

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
            "the rotary base, factors and divisors must be positive, a base at least 1": all(
                rope.is_sound() for rope in (self.rope, self.local_rope) if rope is not None
            ),
            "each layer must have a window or none": len(self.windows) in (0, self.num_layers),
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

    @property
    def is_plain(self) -> bool:
        """Tell whether the model has only what the fused decode kernels know."""
        return (
            self.options == PLAIN
            and self.local_rope is None
            and not any(self.window(layer) for layer in range(self.num_layers))
        )

    def window(self, layer: int) -> int:
        """Return how many tokens a layer's query sees at most, its own included; 0: all that the context may hold."""
        window = self.windows[layer] if self.windows else 0
        return window if window < self.max_model_len else 0

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int, int]:
        """Return the shape of the KV cache tensor; its second dimension is K, V."""
        return (self.num_layers, 2, num_blocks, block_size, self.num_kv_heads, self.head_dim)

    @property
    def num_matrix_weights(self) -> int:
        """Number of weights in the layers' matrices, but for routers: those that are quantized."""
        mlp = self.num_expert_weights or self.num_layers * 3 * self.hidden_size * self.intermediate_size
        if self.quantization is not None and self.quantization.experts_only:
            return mlp
        return self.num_layers * self.hidden_size * (2 * self.q_size + 2 * self.kv_size) + mlp

    @property
    def num_expert_weights(self) -> int:
        """Number of weights in the experts' matrices."""
        return self.num_layers * 3 * self.hidden_size * self.moe_intermediate_size * self.num_experts

    @property
    def num_output_weights(self) -> int:
        """Number of weights in the output layer, which may be the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def output_quantization(self) -> Quantization | None:
        """How the output layer is quantized, by the config; None: it is not, as it never is where it is tied."""
        return None if self.tie_embeddings or self.quantization is None else self.quantization.output

    @property
    def num_parameters(self) -> int:
        """Number of weights, those of a tied embedding counted once."""
        options = self.options
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        attention += (4 if options.norms == "both" else 2) * self.hidden_size
        attention += self.attention_bias * (self.q_size + 2 * self.kv_size) + self.output_bias * self.hidden_size
        attention += 2 * self.head_dim * self.qk_norm + options.wide_qk_norm * (self.q_size + self.kv_size)
        attention += options.sinks * self.num_heads
        if self.num_experts:
            mlp = self.num_experts * self.hidden_size * (3 * self.moe_intermediate_size + 1)
            mlp += options.expert_biases * self.num_experts * (2 * self.moe_intermediate_size + self.hidden_size + 1)
        else:
            mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.num_output_weights * (1 if self.tie_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings + self.hidden_size
