# SPDX-License-Identifier: Apache-2.0
"""What a model's weights take of memory, by its description. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from blink.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """What the weights take, and how much of that one token reads."""

    total: int
    read: int


def count_weights(spec: ModelSpec, size: int, *, stays_quantized: bool) -> WeightBytes:
    """Count weights, and those that one token needs: its experts, and of an embedding that is no output a row."""
    active = spec.with_layers(lambda layer: replace(layer, mlp=layer.mlp.active))
    total = spec.num_parameters * size
    unread = spec.num_table_weights + (0 if spec.tie_embeddings else spec.num_output_weights)
    read = (active.num_parameters - unread) * size
    scheme, output = spec.quantization, spec.output_quantization
    if stays_quantized and scheme is not None:  # on a GPU
        experts = spec.num_expert_weights
        total -= int(experts * (size - scheme.weight_bytes))
        total -= int((spec.num_matrix_weights - experts) * (size - scheme.kept_bytes))
        read -= int(active.num_matrix_weights * (size - scheme.weight_bytes))
    if stays_quantized and output is not None:
        total -= int(spec.num_output_weights * (size - output.kept_bytes))
        read -= int(spec.num_output_weights * (size - output.weight_bytes))
    return WeightBytes(total, read)
