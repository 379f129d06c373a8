# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings: the inputs that layers have of their own, of all that a segment of a step has."""

from __future__ import annotations

from torch import Tensor

from blink.kernels.layer_inputs import JoinInputs
from blink.models.layer_weights import LayerInputWeights
from blink.runner.matmul import linear


def compute_layer_inputs(
    join: JoinInputs, weights: LayerInputWeights, ids: Tensor, embeddings: Tensor, layers: range, eps: float
) -> Tensor:
    """Return [tokens, layers, input_size]: what a table has of each token, and what its embedding is projected to."""
    projected, scale = linear(embeddings, weights.projection), embeddings.shape[1] ** -0.5
    return join(projected, weights.table, ids, weights.norm, layers, scale=scale, eps=eps)
