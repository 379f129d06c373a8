# SPDX-License-Identifier: Apache-2.0
"""MtpHead: the layer of a checkpoint that predicts one token further (multi-token prediction). runner/mtp.py runs it.

Of a token and the model's hidden state before it, both normalised, it makes the input of a layer like the model's own.
Embedding and output layer are the model's. The form is that of Qwen3-Next; the idea is that of DeepSeek-V3
(https://arxiv.org/abs/2412.19437).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from blink.formats.base import Weight
from blink.kernels.operands import Norm
from blink.models.layer_weights import LayerWeights
from blink.models.layers import Attention
from blink.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpHead:
    """The layer as a model of its own, and what makes its input; matrices as pack_weight returned them."""

    spec: ModelSpec  # of one layer
    layer: LayerWeights
    norm: Norm  # behind it
    embedding_norm: Tensor  # [hidden], as hidden_norm
    hidden_norm: Tensor
    fusion: Weight  # [hidden, 2 * hidden]: of the embedding, of the hidden state

    @property
    def attention(self) -> Attention:
        """The layer's, which keeps keys and values as the model's layers do."""
        [attention] = self.spec.attentions
        return attention
