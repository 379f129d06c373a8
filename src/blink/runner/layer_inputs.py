# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings: the inputs that layers have of their own, of all layers at once."""

from __future__ import annotations

import math

from torch import Tensor

from blink.kernels.rms_norm import rms_norm
from blink.models.layer_weights import LayerInputWeights
from blink.runner.matmul import linear


def compute_layer_inputs(weights: LayerInputWeights, ids: Tensor, embeddings: Tensor, eps: float) -> Tensor:
    """Return [tokens, layers, input_size]: what a table has of each token, and what its embedding is projected to."""
    tokens, hidden = embeddings.shape
    size = weights.norm.shape[0]
    projected = linear(embeddings, weights.projection).mul_(hidden**-0.5)
    found = rms_norm(projected.view(-1, size), weights.norm, eps).view(tokens, -1, size)
    own = weights.table.index_select(0, ids).view(tokens, -1, size)
    return found.add_(own, alpha=math.sqrt(size)).mul_(math.sqrt(0.5))
