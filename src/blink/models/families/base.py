# SPDX-License-Identifier: Apache-2.0
"""Family: what all models of one model_type share beyond what their files say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from blink.fields import Fields
from blink.models.layers import Norms, QkNorm
from blink.models.mlps import Activation
from blink.models.spec import ModelSpec

NO_WINDOW, EVERY_LAYER = 0, 1

# Adds to a spec what a file says under names that only this family has.
Adapt = Callable[[ModelSpec, Fields], ModelSpec]


def keep(spec: ModelSpec, fields: Fields) -> ModelSpec:  # noqa: ARG001 - an Adapt that adds nothing
    """Return the spec as it is."""
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What checkpoints call the experts of a layer."""

    block: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # gate, up and down of an expert
    are_joined: bool = False  # one tensor of all experts, transposed, gate and up in alternating columns; with biases
    # Files may have a tensor of all experts' matrices in place of one for each, gate before up: [experts, out, in]
    # ("rows") or its transpose ("columns").
    fused: Literal["", "rows", "columns"] = ""
    shared: str = ""  # the block of an expert that all tokens have; empty: there is none
    shared_count: str = ""  # config.json's key of how many experts that one is as wide as; empty: it has a size
    choice_bias: str = ""  # what is added to scores for the choice alone; empty: nothing is
    is_choice_bias_row: bool = False  # [1, experts]
    are_beside: bool = False  # each layer has a dense MLP, and some models experts beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A row of FAMILIES; the defaults add nothing to the plain decoder."""

    title: str
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])  # of values that config.json leaves out
    also_known_as: tuple[str, ...] = ()  # model_types of models with more than this text part
    config_names: Mapping[str, str] = field(default_factory=dict[str, str])  # of values that others call otherwise
    adapt_config: Adapt = keep
    # Layers.
    has_rope: bool = True
    norms: Norms = "before"
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False  # whatever the config says
    sinks: bool = False
    activation: Activation | None = None  # whatever the config says
    window_period: int = NO_WINDOW  # where a window is set: EVERY_LAYER has it, or all but every n-th
    # Tensors.
    tensor_names: Mapping[str, str] = field(default_factory=dict[str, str])  # by Llama's, without a layer's index
    is_qkv_fused: bool = False  # queries, keys and values in one tensor
    is_gate_up_fused: bool = False
    rotates_pairs: bool = False  # components 2i and 2i + 1 of queries and keys are a pair, not i and i + half
    shifted_norms: bool = False  # each norm's weight is stored minus 1
    experts: ExpertNames | None = None  # None: a dense MLP
    recurrent_block: str = "linear_attn"  # of recurrent layers
    has_grouped_projections: bool = False  # recurrent layers: one tensor for q, k, v and z, grouped by key head; b, a
    has_mtp: bool = False  # files may have a layer that predicts one token further: its tensors begin with mtp.
    score_tokens: tuple[str, ...] = ()  # of the family's rerankers: those that say no and yes; empty: there are none
    # GGUF files.
    gguf: str = ""  # its name there; empty: not read from them
    gguf_mixture: str = ""  # the family of those files of this name that have experts
    gguf_windowed: str = ""  # likewise that have windows
    gguf_others: tuple[str, ...] = ()  # families whose files have this name, too
    gguf_local_theta: float = 0.0  # the rotary base of layers with a window, which the files do not say; 0: as others'
    is_interleaved: bool = False  # components of queries and keys that are rotated as a pair are neighbours
    has_tiled_heads: bool = False  # recurrent layers: the first value head of each key head, then each second one
    adapt_gguf: Adapt = keep
    gguf_class: str = ""  # transformers' class, of families that are quantized from GGUF files; empty: they are not
