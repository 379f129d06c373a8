# SPDX-License-Identifier: Apache-2.0
"""The weights of one decoder layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

from torch import Tensor

from blink.formats.base import QuantizedWeight, Weight, matrix_of
from blink.formats.experts import ExpertWeights, experts_of
from blink.kernels.operands import PLAIN_ATTENTION, AttentionOptions, Expansion, HeadNorm, Norm
from blink.models.mlps import Activation, MoeMlp


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """The MLP; weights as pack_weight returned them."""

    gate_up: Weight  # [2 * intermediate, hidden], or [intermediate, hidden] without a gate
    down: Weight  # [hidden, intermediate]
    activation: Activation = "silu"
    biases: tuple[Tensor | None, Tensor | None] = (None, None)  # of both

    @property
    def sites(self) -> dict[str, Any]:
        """What is multiplied."""
        return {"dense": (matrix_of(self.gate_up), matrix_of(self.down))}

    def add_to(self, stream: Any, *others: Any) -> None:
        """Let a stream of runner/ add it to its residual."""
        stream.add_dense(self, *others)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token has."""

    mlp: DenseWeights
    gate: Tensor | None  # [hidden], whose product's sigmoid it is multiplied by; None: by nothing


@dataclass(frozen=True, slots=True)
class MlpBeside:
    """A dense MLP whose norm that of the experts is added to."""

    mlp: DenseWeights
    end_norm: Tensor  # [hidden]
    experts_norm: Tensor  # of what the experts read
    experts_end_norm: Tensor
    router_norm: Tensor  # of what the router reads


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A gated MLP per expert and the router that chooses among them."""

    spec: MoeMlp
    router: Weight  # [experts, hidden]; float32 unless the router is plain
    gate_up: ExpertWeights  # [experts, 2 * intermediate, hidden]
    down: ExpertWeights  # [experts, hidden, intermediate]
    router_bias: Tensor | None = None  # [experts]
    biases: tuple[Tensor, Tensor] | None = None  # of gate_up [experts, 2 * intermediate], of down [experts, hidden]
    shared: SharedExpert | None = None
    beside: MlpBeside | None = None
    choice_bias: Tensor | None = None  # float32 [experts]; is added to scores for the choice alone
    first: int = 0  # the router's number of the first expert here

    @property
    def sites(self) -> dict[str, Any]:
        """What is multiplied."""
        is_plain, top_k = self.spec.has_plain_experts, self.spec.router.top_k
        experts = experts_of(self.gate_up, self.down, top_k, is_plain=is_plain)
        dense = self.shared or self.beside
        shared = {} if dense is None else dense.mlp.sites
        return {"router": matrix_of(self.router), "experts": experts, **shared}

    def add_to(self, stream: Any, *others: Any) -> None:
        """Let a stream of runner/ add it to its residual."""
        stream.add_experts(self, *others)


class RuleWeights(Protocol):
    """The small weights of a recurrent layer's rule, as its kernels take them."""

    def merging(self, merge_means: Any) -> RuleWeights:
        """Return them for a layer with a part of the outputs that are normalised together, whose means are merged."""
        ...

    def project(self, qkvz: Tensor, gates: Tensor) -> Any:
        """Tell apart what the two projections made."""
        ...


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """What a recurrent layer has beside its two large projections."""

    gates: Weight  # [num_gates of its mixer, hidden]
    rule: RuleWeights


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """What latent attention has beside its first and its last projection."""

    query_norm: Tensor | None  # [query_rank]; None: queries are projected once
    query: Weight | None  # [heads * (nope + rope), query_rank]
    expansion: Expansion


@dataclass(frozen=True, slots=True)
class InputWeights:
    """What a layer adds last: its own input, gated by the residual, projected and normalised."""

    gate: Weight  # [input_size, hidden]
    projection: Weight  # [hidden, input_size]
    norm: Tensor  # [hidden]


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """What happens to the residual behind a layer's MLP."""

    inputs: InputWeights | None
    scale: Tensor  # [1]


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """What makes the inputs that layers have of their own: from a token, and from its embedding."""

    table: Tensor  # [tokens, layers * input_size]
    projection: Weight  # [layers * input_size, hidden]
    norm: Tensor  # [input_size]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer; matrices as pack_weight returned them."""

    attention_norm: Norm | None
    # [in_size of its mixer, hidden]: queries, each head's with its gate behind it if it has one, keys, values; or q, k,
    # v and z of a recurrent layer; or of latent attention queries, or what they are projected of, and what is kept
    qkv: Weight
    qkv_bias: Tensor | None
    output: Weight  # [hidden, out_size]
    output_bias: Tensor | None
    head_norm: HeadNorm | None
    mlp_norm: Norm | None
    mlp: DenseWeights | MoeWeights
    attention_end_norm: Norm | None = None  # of what attention adds to the residual
    mlp_end_norm: Norm | None = None
    wide_norm: HeadNorm | None = None  # over all query heads, over all key heads
    attention: AttentionOptions = PLAIN_ATTENTION
    recurrent: RecurrentWeights | None = None
    latent: LatentWeights | None = None
    end: LayerEnd | None = None


def count_bytes(part: object) -> int:
    """Return the bytes of all weights in a layer, or in a part of one."""
    return sum(weight.nbytes for weight in list_weights(part))


def list_weights(part: object) -> Iterator[Weight]:
    """List all weights in a layer, or in a part of one."""
    if isinstance(part, Tensor | QuantizedWeight):
        yield part
    elif isinstance(part, tuple | list):
        for item in part:
            yield from list_weights(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from list_weights(getattr(part, field.name))
