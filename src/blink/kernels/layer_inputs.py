# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings: what a table has of each token, added to what its embedding was projected to."""

from __future__ import annotations

from torch import Tensor

from blink.kernels.cpu import layer_inputs as cpu


def join_inputs(
    projected: Tensor, table: Tensor, ids: Tensor, weight: Tensor, layers: range, *, scale: float, eps: float
) -> Tensor:
    """Return (norm(projected * scale) + table[ids] * sqrt(size)) / sqrt(2) of some layers [tokens, layers, size].

    projected: [tokens, all layers * size]; table: [rows, all layers * size], in the memory of projected's device, or of
    the host and readable by that device; ids: [tokens], each below rows; weight: of the norm of a layer's part, [size].
    """
    assert projected.shape[1] == table.shape[1] and projected.shape[1] % weight.shape[0] == 0
    assert ids.shape[0] == projected.shape[0] and layers.stop * weight.shape[0] <= projected.shape[1]
    if projected.is_cuda:
        from blink.kernels.gpu import layer_inputs as gpu

        return gpu.join_inputs(projected, table, ids, weight, layers, scale=scale, eps=eps)
    return cpu.join_inputs(projected, table, ids, weight, layers, scale=scale, eps=eps)
