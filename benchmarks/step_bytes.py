# SPDX-License-Identifier: Apache-2.0
"""How many bytes a decode step must read at least: the floor of its time is these over the memory's bandwidth."""

from __future__ import annotations

import math
from pathlib import Path

from blink.formats.schemes import FP8_ROWS
from blink.models.layers import LayerSpec
from blink.models.mlps import MoeMlp
from blink.models.spec import ModelSpec
from blink.models.weights.gguf_file import GgufFile


def weight_bytes(spec: ModelSpec, rows: int, itemsize: int, quantization: str = "auto") -> float:
    """Return the bytes of weights that a step of `rows` rows reads; quantization: as the option says.

    Of a mixture of experts, those of the experts that are chosen at least once: their expected number, if each token
    chooses evenly at random. Trained routers are less even and read fewer. A table of input embeddings is left out, and
    of one of per-layer embeddings all but a row for each token.
    """
    scheme, output = spec.quantization, spec.output_quantization
    if quantization == "fp8":
        scheme, output = FP8_ROWS, None if spec.tie_embeddings else FP8_ROWS
    num_weights = spec.num_parameters - (0 if spec.tie_embeddings else spec.num_output_weights)
    if spec.layer_inputs is not None:
        num_weights -= (spec.layer_inputs.rows - rows) * spec.num_layers * spec.layer_inputs.size
    num_quantized = spec.num_matrix_weights if scheme else 0
    if spec.mixture is not None:
        unused = spec.num_expert_weights * (1 - distinct_experts(spec.mixture, rows) / spec.mixture.experts)
        num_weights -= unused
        num_quantized -= unused if scheme else 0
    found = (num_weights - num_quantized) * itemsize + num_quantized * (scheme.weight_bytes if scheme else 0)
    return found - (spec.num_output_weights * (itemsize - output.weight_bytes) if output else 0)


def gguf_bytes(path: Path, spec: ModelSpec, rows: int, itemsize: int) -> float:
    """Return the same of a GGUF file's tensors as a GPU keeps them; itemsize: of what does not stay quantized."""
    share = distinct_experts(spec.mixture, rows) / spec.mixture.experts if spec.mixture is not None else 0.0
    found = 0.0
    for name, tensor in GgufFile(path).tensors.items():
        is_table = name.startswith("token_embd") and not spec.tie_embeddings
        size = tensor.gpu_bytes if tensor.can_stay_quantized(on_gpu=True) else math.prod(tensor.shape) * itemsize
        found += 0.0 if is_table else size * share if "_exps." in name else size
    return found


def distinct_experts(mlp: MoeMlp, rows: int) -> float:
    """Return how many experts of a layer `rows` tokens are expected to choose, if each chooses evenly at random."""
    return mlp.experts * (1 - (1 - mlp.router.top_k / mlp.experts) ** rows)


def cache_bytes(spec: ModelSpec, rows: int, context: float, itemsize: int) -> float:
    """Return the bytes of the cache that a step moves, at a mean context.

    Keys and values, of `itemsize` bytes, are read: by a layer with a window no more of them than that, and by one that
    shares another's once more. Recurrent layers read and write their states.
    """

    def count(layer: LayerSpec) -> float:
        attention = layer.mixer.attention
        if attention is None:
            return 0
        return min(context, attention.window or context) * 2 * attention.kv_size

    return rows * (sum(map(count, spec.layers)) * itemsize + 2 * spec.cache_layout.bytes_per_sequence(2))
