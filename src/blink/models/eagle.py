# SPDX-License-Identifier: Apache-2.0
"""EagleHead: the weights of an EAGLE-3 draft head. weights/eagle_loader.py reads them, runner/eagle.py runs them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from blink.formats.base import Weight
from blink.models.layer_weights import DenseWeights
from blink.models.layers import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead:
    """One layer that reads a model's residuals, and a vocabulary of its own; matrices as pack_weight returned them."""

    attention: Attention
    eps: float  # of its norms
    layers: tuple[int, ...]  # of the model: it reads what the residual is as each of them begins
    residual_is_normed: bool  # whether what the layer adds to is normalised before
    embedding: Tensor | None  # [model's vocab, hidden]; None: it reads the model's
    rotary_table: Tensor  # float32 [positions, rotary_dim]
    fusion: Weight  # [hidden, layers * model's hidden]
    embedding_norm: Tensor  # [hidden], as the other norms
    hidden_norm: Tensor
    qkv: Weight  # [in_size of its attention, 2 * hidden]: of the embedding, of the hidden state
    output: Weight  # [hidden, out_size]
    mlp_norm: Tensor
    mlp: DenseWeights
    norm: Tensor
    lm_head: Weight  # [own vocab, hidden]
    tokens: Tensor  # int64 [own vocab]: which of the model's tokens each of its own is
