# SPDX-License-Identifier: Apache-2.0
"""How many bytes a decode step must read at least: the floor of its time is these over the memory's bandwidth."""

from __future__ import annotations

from blink.formats.schemes import FP8_ROWS
from blink.models.mlps import MoeMlp
from blink.models.spec import ModelSpec


def weight_bytes(spec: ModelSpec, rows: int, itemsize: int, quantization: str = "auto") -> float:
    """Return the bytes of weights that a step of `rows` rows reads; quantization: as the option says.

    Of a mixture of experts, those of the experts that are chosen at least once: their expected number, if each token
    chooses evenly at random. Trained routers are less even and read fewer. A table of input embeddings is left out.
    """
    scheme, output = spec.quantization, spec.output_quantization
    if quantization == "fp8":
        scheme, output = FP8_ROWS, None if spec.tie_embeddings else FP8_ROWS
    num_weights = spec.num_parameters - (0 if spec.tie_embeddings else spec.num_output_weights)
    num_quantized = spec.num_matrix_weights if scheme else 0
    if spec.mixture is not None:
        unused = spec.num_expert_weights * (1 - distinct_experts(spec.mixture, rows) / spec.mixture.experts)
        num_weights -= unused
        num_quantized -= unused if scheme else 0
    found = (num_weights - num_quantized) * itemsize + num_quantized * (scheme.weight_bytes if scheme else 0)
    return found - (spec.num_output_weights * (itemsize - output.weight_bytes) if output else 0)


def distinct_experts(mlp: MoeMlp, rows: int) -> float:
    """Return how many experts of a layer `rows` tokens are expected to choose, if each chooses evenly at random."""
    return mlp.experts * (1 - (1 - mlp.router.top_k / mlp.experts) ** rows)


def cache_bytes(spec: ModelSpec, rows: int, context: float, itemsize: int) -> float:
    """Return the bytes of the cache that a step moves, at a mean context.

    Keys and values, of `itemsize` bytes, are read; recurrent layers read and write their states.
    """
    layout = spec.cache_layout
    return rows * (context * layout.bytes_per_block(1, itemsize) + 2 * layout.bytes_per_sequence(2))
