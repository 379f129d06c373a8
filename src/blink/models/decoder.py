# SPDX-License-Identifier: Apache-2.0
"""Decoder: a model's weights, and what they say of its KV cache. runner/ runs its steps."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.base import QuantizedEmbedding, Weight
from blink.kernels.layer_cache import KvCache, LayerCache
from blink.kernels.rotary import make_rotary_table
from blink.models.layer_weights import LayerWeights, count_bytes
from blink.models.spec import ModelSpec


class Decoder:
    """A model with its weights."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Tensor | QuantizedEmbedding,
        layers: list[LayerWeights],
        norm: Tensor,
        lm_head: Weight,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Take the weights: embedding [vocab, hidden], norm [hidden], lm_head [vocab, hidden] from pack_weight.

        kv_dtype: of keys and values in the KV cache; None: the weights'.
        """
        self.spec = spec
        self.device = embedding.device
        self.dtype = embedding.dtype
        self.kv_dtype = kv_dtype or embedding.dtype
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.attentions = [layer.mixer for layer in spec.distinct_layers]
        ropes = list(dict.fromkeys(attention.rope for attention in self.attentions))
        # Of each different rope, float32 [positions, rotary_dim]; and which of them is each layer's.
        self.rotary_tables = [
            make_rotary_table(rope.frequencies(), spec.max_model_len, self.device, rope.magnitude) for rope in ropes
        ]
        self.table_of = [ropes.index(layer.mixer.rope) for layer in spec.layers]

    @property
    def num_weight_bytes(self) -> int:
        """How many bytes the weights take; a step reads them all but for experts that no token has."""
        weights: list[object] = [self.embedding, *self.layers, self.norm]
        return count_bytes(weights if self.lm_head is self.embedding else [*weights, self.lm_head])

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """Allocate a KV cache of zeros: one tensor for each group of layers."""
        # Zeros, because attention multiplies what it masks by 0, and uninitialised memory may hold NaN. Written, for
        # a host's memory would else be taken page by page while serving, and might then not be there.
        caches: dict[int, LayerCache] = {}
        for group in self.spec.cache_layout.groups:
            memory = torch.empty(group.shape(num_blocks, block_size), dtype=self.kv_dtype, device=self.device).zero_()
            caches.update(zip(group.layers, map(LayerCache, memory), strict=True))
        return tuple(caches[layer] for layer in sorted(caches))
