# SPDX-License-Identifier: Apache-2.0
"""Decoder: a model's weights, and what its layers keep of sequences. runner/ runs its steps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from blink.formats.base import QuantizedEmbedding, Weight
from blink.kernels.layer_cache import KvCache, LayerCache, Snapshots, StateCache, allocate_cache
from blink.kernels.operands import Norm
from blink.kernels.rotary import make_rotary_table
from blink.models.eagle import EagleHead
from blink.models.layer_weights import LayerInputWeights, LayerWeights, count_bytes
from blink.models.mtp import MtpHead
from blink.models.spec import ModelSpec


class Decoder:
    """A model with its weights."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Tensor | QuantizedEmbedding,
        layers: list[LayerWeights],
        norm: Norm,
        lm_head: Weight,
        kv_dtype: torch.dtype | None = None,
        positions: Tensor | None = None,
        inputs: LayerInputWeights | None = None,
        classifier: Tensor | None = None,
    ) -> None:
        """Take the weights: embedding [vocab, hidden], norm [hidden], lm_head [vocab, hidden] from pack_weight.

        kv_dtype: of keys and values in the KV cache; None: the weights'. positions: what is added to the embedding at
        each position, [positions, hidden]. inputs: of per-layer embeddings. classifier: of a reranker, float32
        [1, hidden].
        """
        self.spec = spec
        self.device = embedding.device
        self.dtype = embedding.dtype
        self.kv_dtype = kv_dtype or embedding.dtype
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.positions = positions
        self.inputs = inputs
        self.classifier = classifier
        self.head: EagleHead | MtpHead | None = None
        self.allocate_cells = allocate_cache  # where what layers keep lies; an engine may have other memory for it
        self.attentions = spec.attentions
        ropes = list(dict.fromkeys(attention.rope for attention in self.attentions))
        # Of each different rope, float32 [positions, rotary_dim]; and which of them is each layer's.
        self.rotary_tables = [
            make_rotary_table(rope.frequencies(), spec.max_model_len, self.device, rope.magnitude) for rope in ropes
        ]
        attentions = {index: layer.mixer.attention for index, layer in enumerate(spec.layers)}
        self.table_of = {index: ropes.index(one.rope) for index, one in attentions.items() if one is not None}

    @property
    def num_weight_bytes(self) -> int:
        """How many bytes the weights take; a step reads them all but for experts that no token has."""
        weights: list[object] = [self.embedding, self.positions, self.inputs, *self.layers, self.norm, self.head]
        return count_bytes(weights if self.lm_head is self.embedding else [*weights, self.lm_head])

    def add_head(self, head: EagleHead | MtpHead, spare_blocks: int = 0) -> None:
        """Take a draft head, whose layer keeps keys and values as the model's layers do, and spare blocks."""
        self.head, self.spec = head, replace(self.spec, drafter=head.attention, spare_blocks=spare_blocks)

    def keep_rollback(self, num_tokens: int) -> None:
        """Let recurrent layers keep what it takes that so many tokens of a step may be taken back."""
        self.spec = replace(self.spec, rollback=num_tokens)

    def free_weights(self) -> None:
        """Let go of all weights; the model can only be described then."""
        nothing = torch.empty(0, 0, dtype=self.dtype, device=self.device)
        self.embedding = self.lm_head = nothing
        self.layers, self.rotary_tables = [], []
        self.positions = self.inputs = self.classifier = self.head = None

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int = 1,
        num_snapshots: int = 0,
        num_window_blocks: int = 0,
    ) -> KvCache:
        """Allocate what the layers keep, all zeros: one tensor for each group of layers, two for recurrent ones.

        num_slots: the sequences that recurrent layers keep states of; num_snapshots: the prefixes. num_window_blocks:
        of layers with a window; 0: these have num_blocks, and share the tables of the others.
        """
        layout = self.spec.cache_layout
        layers: dict[int, LayerCache] = {}
        for group in layout.groups:
            count = (group.state.window and num_window_blocks) or num_blocks
            memory = self._allocate(*group.shape(count + group.state.spare_blocks, block_size), dtype=self.kv_dtype)
            layers.update(zip(group.layers, map(LayerCache, memory), strict=True))
        recurrent: dict[int, StateCache] = {}
        groups: list[StateCache] = []
        for group in layout.recurrent:
            sizes = len(group.layers), num_slots + num_snapshots
            states = self._allocate(*sizes, *group.state.state, dtype=torch.float32)
            kept = (self._allocate(*sizes, *shape, dtype=self.dtype) for shape in group.state.kept)
            groups.append(StateCache(states, *kept))
            recurrent.update(zip(group.layers, groups[-1].layers(), strict=True))
        mixers = {index: layer.mixer.attention for index, layer in enumerate(self.spec.layers)}
        sources = {index: one.kv_source for index, one in mixers.items() if one and one.kv_source is not None}
        snapshots = Snapshots(tuple(groups), num_slots) if num_snapshots else None
        return KvCache(layers, recurrent, snapshots, sources)

    def _allocate(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.allocate_cells(shape, dtype, self.device)
