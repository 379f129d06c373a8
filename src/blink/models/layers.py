# SPDX-License-Identifier: Apache-2.0
"""LayerSpec: what each layer of a model computes, but for its weights. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from blink.models.cache_layout import CONV_WIDTH, PerSequence, PerToken
from blink.models.latent import Latent
from blink.models.mamba import Mamba2
from blink.models.mlps import DenseMlp, MoeMlp
from blink.models.part import Part
from blink.models.rope import Rope, unrotated
from blink.models.shard import divides_heads

# Each head of queries and keys by itself, with a weight or (plain_head) without, or one norm over all of them.
QkNorm = Literal["none", "head", "plain_head", "all_heads"]
# Where attention and MLP are normalised; "replacing": the residual becomes the norm of itself behind each of both.
Norms = Literal["before", "after", "both", "replacing"]


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + slope * ln(1 + floor((p + offset) / period))."""

    slope: float
    period: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Part):
    """Softmax attention, in which query heads share key-value heads.

    Latent attention has one of them, whose keys are what a token keeps and whose values are a part of it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 0  # how many tokens a query sees at most, its own included; 0: all that the context may hold
    chunk: int = 0  # a query sees its own one of the chunks of so many tokens that the context is cut into; 0: all
    softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: as they are
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    sinks: bool = False  # each query head has a score that takes part in the softmax, but no value
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    # What a query head attends to is multiplied by the sigmoid of its gate, which is projected behind its query.
    output_gate: bool = False
    query_growth: QueryGrowth | None = None
    value_norm: bool = False  # each head of values is normalised, without a weight
    keys_as_values: bool = False  # values are keys before their norm and rotation
    kv_source: int | None = None  # the layer whose keys and values these queries see; None: its own
    latent: Latent | None = None

    @property
    def attention(self) -> Attention:
        """It is one."""
        return self

    @property
    def recurrence(self) -> None:
        """It is none."""
        return

    @property
    def in_size(self) -> int:
        """Width of what is projected of one token."""
        if self.latent is not None:
            return self.latent.in_size(self.heads)
        return (1 + self.output_gate) * self.q_size + (2 * self.kv_size if self.kv_source is None else 0)

    @property
    def out_size(self) -> int:
        """Width of what is projected back."""
        return self.q_size if self.latent is None else self.heads * self.latent.value

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or the values) of one token."""
        return self.kv_heads * self.head_dim

    @property
    def shape(self) -> tuple[int, int, int]:
        """Query heads, key-value heads and the size of each: what attention is planned by."""
        return self.heads, self.kv_heads, self.head_dim

    @property
    def group(self) -> int:
        """How many query heads share a key-value head."""
        return self.heads // self.kv_heads

    @property
    def rules(self) -> dict[str, bool]:
        """What the values must be to each other, and whether they are."""
        rotary_dim = self.rope.rotary_dim
        has_one_head = self.kv_heads == 1 and rotary_dim == (self.latent.rope if self.latent else rotary_dim)
        return {
            "latent attention must have one head of keys, and rotate its own part": not self.latent or has_one_head,
            "the query heads must be a multiple of the key-value heads": self.heads % self.kv_heads == 0,
            "the size of a head must be even and at least 2": self.head_dim >= 2 and self.head_dim % 2 == 0,
            "the rotated part must be even and within the head": (
                2 <= rotary_dim <= self.head_dim and rotary_dim % 2 == 0
            ),
            "the rotary base, factors and divisors must be positive, a base at least 1": self.rope.is_sound(),
        }

    @property
    def state(self) -> PerToken | None:
        """What the layer keeps of each token; None: another layer keeps it."""
        if self.kv_source is not None:
            return None
        has_values = self.latent is None
        return PerToken(kv_heads=self.kv_heads, head_dim=self.head_dim, has_values=has_values, window=self.window)

    @property
    def recurrent_state(self) -> None:
        """It keeps nothing else."""
        return

    def matrices(self, hidden: int) -> list[tuple[int, int]]:
        """Return rows and columns of the matrices that all tokens multiply with."""
        again = None if self.latent is None else self.latent.query_matrix(self.heads)
        return [(self.in_size, hidden), *([again] if again else []), (hidden, self.out_size)]

    def split_rules(self, size: int) -> dict[str, bool]:
        """Return what a number of ranks must divide, and whether it does."""
        return {
            f"{self.heads} query heads": self.heads % size == 0,
            f"{self.kv_heads} key-value heads": self.latent is not None or divides_heads(self.kv_heads, size),
        }

    def split(self, size: int) -> Attention:
        """Return what one of so many ranks has: its heads, and the one latent whole."""
        return replace(self, heads=self.heads // size, kv_heads=max(self.kv_heads // size, 1))

    def with_scale(self, scale: float) -> Attention:
        """Return attention whose scores are scaled so, as by default if that is the same."""
        return replace(self, scale=None if math.isclose(scale, self.head_dim**-0.5) else scale)

    def num_matrix_weights(self, hidden: int) -> int:
        """Return the number of weights in the matrices."""
        return sum(rows * columns for rows, columns in self.matrices(hidden))

    def num_parameters(self, hidden: int) -> int:
        """Return the number of all weights."""
        if self.latent is not None:
            others = self.latent.num_expanding_weights(self.heads) + self.latent.rank + self.latent.query_rank
            return self.num_matrix_weights(hidden) + others
        biases = self.qkv_bias * self.in_size + self.output_bias * hidden
        own_keys = self.kv_source is None
        norms = {"head": (1 + own_keys) * self.head_dim, "all_heads": self.q_size + self.kv_size}
        doubled = self.keys_as_values * own_keys * self.kv_size * hidden  # rows that a file has once
        return self.num_matrix_weights(hidden) - doubled + biases + norms.get(self.qk_norm, 0) + self.sinks * self.heads


DELTA_RULE = "gated delta rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet(Part):
    """Linear attention by the gated delta rule: a state of one size, which each token decays and corrects.

    Value head h reads key head h // (v_heads / k_heads). See kernels/delta_rule.py.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int

    @property
    def attention(self) -> None:
        """It is none."""
        return

    @property
    def recurrence(self) -> GatedDeltaNet:
        """It is one."""
        return self

    @property
    def delta_net(self) -> GatedDeltaNet:
        """It is one."""
        return self

    @property
    def mamba(self) -> None:
        """It is none."""
        return

    @property
    def rule(self) -> str:
        """What its kernels compute."""
        return DELTA_RULE

    @property
    def channels(self) -> int:
        """Width of queries, keys and values, which are convolved."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def in_size(self) -> int:
        """Width of what is projected of one token, but for the two numbers of each value head."""
        return self.channels + self.out_size

    @property
    def num_gates(self) -> int:
        """Width of the rest: b and a of each value head."""
        return 2 * self.v_heads

    @property
    def out_size(self) -> int:
        """Width of what is projected back, and of its gate."""
        return self.v_heads * self.v_dim

    @property
    def rules(self) -> dict[str, bool]:
        """What the values must be to each other, and whether they are."""
        return {"the value heads must be a multiple of the key heads": self.v_heads % self.k_heads == 0}

    @property
    def state(self) -> None:
        """It keeps nothing of a token."""
        return

    @property
    def recurrent_state(self) -> PerSequence:
        """What the layer keeps of a sequence."""
        state, inputs = (self.v_heads, self.k_dim, self.v_dim), (CONV_WIDTH, self.channels)
        return PerSequence(state=state, inputs=inputs, gates=self.num_gates)

    def matrices(self, hidden: int) -> list[tuple[int, int]]:
        """Return rows and columns of the matrices that all tokens multiply with."""
        return [(self.in_size, hidden), (self.num_gates, hidden), (hidden, self.out_size)]

    def num_matrix_weights(self, hidden: int) -> int:
        """Return the number of weights in the matrices that are quantized: not the one of 2 * v_heads rows."""
        return hidden * (self.in_size + self.out_size)

    def split_rules(self, size: int) -> dict[str, bool]:
        """Return what a number of ranks must divide, and whether it does."""
        return {f"{self.k_heads} key heads of recurrent layers": self.k_heads % size == 0}

    def split(self, size: int) -> GatedDeltaNet:
        """Return what one of so many ranks has: its heads."""
        return replace(self, k_heads=self.k_heads // size, v_heads=self.v_heads // size)

    def num_parameters(self, hidden: int) -> int:
        """Return the number of all weights."""
        others = CONV_WIDTH * self.channels + 2 * self.v_heads + self.v_dim
        return self.num_matrix_weights(hidden) + self.num_gates * hidden + others


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec(Part):
    """One layer: what mixes the tokens of a sequence, and the MLP of each token; both add to the residual."""

    mixer: Attention | GatedDeltaNet | Mamba2
    mlp: DenseMlp | MoeMlp
    norms: Norms = "before"
    residual_scale: float = 1.0  # of what both add
    norm_biases: bool = False  # norms subtract the mean, and have biases
    input_size: int = 0  # of each token's own input of the layer, which gates what the layer adds last; 0: it has none
    has_scale: bool = False  # the residual is multiplied by a number behind the layer

    @property
    def rules(self) -> dict[str, bool]:
        """What the values must be to each other, and whether they are."""
        return self.mixer.rules | self.mlp.rules

    def split_rules(self, size: int, block: int, mixer_block: int) -> dict[str, bool]:
        """Return what a number of ranks must divide, and whether it does; block: columns that share a scale."""
        columns, name = self.mixer.out_size, f"{self.mixer.out_size} columns in blocks of {mixer_block}"
        whole = {name: columns % (size * mixer_block) == 0} if mixer_block > 1 else {}
        return self.mixer.split_rules(size) | whole | self.mlp.split_rules(size, block)

    def split(self, size: int, block: int) -> LayerSpec:
        """Return what one of so many ranks has."""
        return replace(self, mixer=self.mixer.split(size), mlp=self.mlp.split(size, block))

    def num_parameters(self, hidden: int) -> int:
        """Return the number of all weights."""
        norms = (4 if self.norms == "both" else 2) * self.norm_size(hidden)
        own_input = (2 * self.input_size + 1) * hidden if self.input_size else 0
        return self.mixer.num_parameters(hidden) + self.mlp.num_parameters(hidden) + norms + own_input

    def norm_size(self, hidden: int) -> int:
        """Return the number of weights of one norm."""
        return (1 + self.norm_biases) * hidden


def repeat_layer(
    layer: LayerSpec, windows: Sequence[int], max_model_len: int, local_rope: Rope | None = None
) -> tuple[LayerSpec, ...]:
    """Return a layer for each window in tokens, 0 for none; equal ones are one object.

    local_rope: of the layers with a window, where theirs differs. A window as long as the context is none.
    """
    found: dict[int, LayerSpec] = {}
    for window in {*windows}:
        attention = layer.mixer.attention
        assert attention is not None
        rope = local_rope if window and local_rope is not None else attention.rope
        mixer = replace(attention, window=shorten_window(window, max_model_len), rope=rope)
        found[window] = replace(layer, mixer=mixer)
    return tuple(found[window] for window in windows)


def change_some(
    layers: Sequence[LayerSpec], chosen: Collection[int], change: Callable[[LayerSpec], LayerSpec]
) -> tuple[LayerSpec, ...]:
    """Return layers of which those of some indices are changed; what was one object stays one."""
    found: dict[int, LayerSpec] = {}
    for index in chosen:
        layer = layers[index]
        if id(layer) not in found:
            found[id(layer)] = change(layer)
    return tuple(found[id(layer)] if index in chosen else layer for index, layer in enumerate(layers))


def remove_rope(layer: LayerSpec) -> LayerSpec:
    """Return a layer whose attention rotates nothing."""
    attention = layer.mixer.attention
    assert attention is not None
    return replace(layer, mixer=replace(attention, rope=unrotated(attention.head_dim)))


def shorten_window(window: int, max_model_len: int) -> int:
    """Return a window, 0 if it hides nothing of the longest context."""
    return window if window < max_model_len else 0
