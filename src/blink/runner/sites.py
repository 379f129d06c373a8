# SPDX-License-Identifier: Apache-2.0
"""ModelSites: all that a model multiplies, of its weights or of its description alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blink.formats.base import matrix_of
from blink.formats.layouts import ExpertMatrices, Layout, Matrix
from blink.formats.schemes import ARRAY_GROUP, BF16, FP8_ROWS, Quantization
from blink.models.decoder import Decoder
from blink.models.layer_weights import LayerWeights
from blink.models.layers import LayerSpec
from blink.models.spec import ModelSpec

_ROWS = 16  # that a packed matrix has a multiple of


@dataclass(frozen=True, slots=True)
class LayerSites:
    """What one layer multiplies."""

    spec: LayerSpec
    qkv: Matrix
    output: Matrix
    dense: tuple[Matrix, Matrix] | None = None  # fused gate-up and down, of all tokens
    router: Matrix | None = None
    experts: ExpertMatrices | None = None
    gates: Matrix | None = None  # of a recurrent layer
    query: Matrix | None = None  # of latent attention: the second projection of queries

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices but for experts and their router."""
        query = () if self.query is None else (self.query,)
        return (self.qkv, *query, self.output, *(self.dense or ()))


@dataclass(frozen=True, slots=True)
class ModelSites:
    """What a model multiplies, and what its steps depend on besides."""

    spec: ModelSpec
    layers: Sequence[LayerSites]
    head: Matrix
    embedding: Matrix
    dtype: str  # of the activations
    kv_dtype: str
    block_size: int  # tokens of a block of the KV cache

    @property
    def packed(self) -> bool:
        """Tell whether any matrix is packed."""
        return any(matrix.is_packed for layer in self.layers for matrix in (*layer.matrices, self.head))


def sites_of(model: Decoder, block_size: int) -> ModelSites:
    """Describe a model by its weights."""
    layers = [_describe(spec, weights) for spec, weights in zip(model.spec.layers, model.layers, strict=True)]
    head, embedding = matrix_of(model.lm_head), matrix_of(model.embedding)
    kv_dtype = str(model.kv_dtype).removeprefix("torch.")
    return ModelSites(model.spec, layers, head, embedding, embedding.dtype, kv_dtype, block_size)


def _describe(spec: LayerSpec, weights: LayerWeights) -> LayerSites:
    gates = None if weights.recurrent is None else matrix_of(weights.recurrent.gates)
    query = None if weights.latent is None or weights.latent.query is None else matrix_of(weights.latent.query)
    output, sites = matrix_of(weights.output), weights.mlp.sites
    if "experts" in sites:
        sites["experts"] = replace(sites["experts"], dtype=output.dtype)
    return LayerSites(spec, matrix_of(weights.qkv), output, **sites, gates=gates, query=query)


Expect = Callable[[int, int], Matrix]  # of rows and columns


def expected_sites(
    spec: ModelSpec, block_size: int, *, fp8: bool = False, gguf: bool = False, kv_dtype: str = "bfloat16"
) -> ModelSites:
    """Describe a model on a GPU by its description: as if all matrices were quantized that may be.

    fp8: whether matrices of 16 bits are made FP8; gguf: whether all matrices are quantized in a GGUF file.
    """
    scheme = spec.quantization or (FP8_ROWS if fp8 else None)
    of_layers = None if scheme is not None and scheme.experts_only else scheme
    expect: Expect = _expect_gguf if gguf else functools.partial(_expect, of_layers)
    found = {layer: _expect_layer(layer, spec, expect, scheme) for layer in spec.distinct_layers}
    sizes = len(spec.vocab_part), spec.hidden_size
    embedding = _expect_gguf(*sizes) if gguf else _expect(None, *sizes)
    of_head = spec.output_quantization
    if fp8 and spec.quantization is None and not spec.tie_embeddings:
        of_head = FP8_ROWS
    head = embedding if gguf else _expect(of_head, *sizes)
    return ModelSites(spec, [found[layer] for layer in spec.layers], head, embedding, "bfloat16", kv_dtype, block_size)


def _expect_layer(layer: LayerSpec, model: ModelSpec, expect: Expect, scheme: Quantization | None) -> LayerSites:
    mixer, mlp, hidden = layer.mixer, layer.mlp.mixture, model.hidden_size
    qkv, output = expect(mixer.in_size, hidden), expect(hidden, mixer.out_size)
    # What is never quantized: routers, and what a recurrent layer has for each value head.
    gates = None if mixer.recurrence is None else _expect(None, mixer.recurrence.num_gates, hidden)
    latent = None if mixer.attention is None else mixer.attention.latent
    again = None if latent is None or mixer.attention is None else latent.query_matrix(mixer.attention.heads)
    query = None if again is None else expect(*again)
    shapes = layer.mlp.matrices(hidden)[0 if mlp is None else 1 :]  # of a mixture the first is the router
    dense = (expect(*shapes[0]), expect(*shapes[1])) if shapes else None
    if mlp is None:
        return LayerSites(layer, qkv, output, dense, gates=gates, query=query)
    if scheme is not None and mlp.biases and not scheme.experts_only:
        scheme = None  # experts of one tensor stay in 16 bits
    encoding = BF16 if scheme is None else scheme.encoding
    stays_gguf = expect is _expect_gguf and model.shard.size == 1  # ranks dequantise a GGUF file's experts
    if stays_gguf or (scheme is not None and scheme.in_arrays):
        encoding = None  # one of many
    sizes = mlp.own_experts, mlp.router.top_k, hidden, mlp.size
    experts = ExpertMatrices(*sizes, (encoding, encoding), mlp.has_plain_experts)
    router = _expect(None, mlp.experts, hidden)
    if not mlp.router.is_plain:
        router = replace(router, encoding=None, dtype="float32")
    return LayerSites(layer, qkv, output, dense, router, experts, gates, query)


def _expect_gguf(n: int, k: int) -> Matrix:
    return Matrix(n, k, Layout.GGUF, None)


def _expect(scheme: Quantization | None, n: int, k: int) -> Matrix:
    if scheme is not None and scheme.in_arrays:
        return _expect_gguf(n, k) if k % ARRAY_GROUP == 0 else Matrix(n, k, Layout.ROWS, BF16)
    if scheme is None or n % _ROWS or k % scheme.format.unit:
        return Matrix(n, k, Layout.ROWS, BF16)
    return Matrix(n, k, Layout.UNITS, scheme.encoding)
