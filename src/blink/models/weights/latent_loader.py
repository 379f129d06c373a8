# SPDX-License-Identifier: Apache-2.0
"""Read what latent attention mixes tokens with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blink.kernels.operands import AttentionOptions, Expansion, KvScales
from blink.models.latent import Latent
from blink.models.layer_weights import LatentWeights
from blink.models.layers import Attention
from blink.models.weights.head_order import separate_pairs
from blink.models.weights.tensor_loader import TensorLoader


@dataclass(frozen=True, slots=True)
class LatentLoader:
    """Reads layers of a model, as fields of LayerWeights. Each method raises a ConfigError if a tensor is missing."""

    tensors: TensorLoader
    hidden: int

    def load(self, mixer: Attention, prefix: str, kv_scales: KvScales) -> dict[str, Any]:
        """Read a layer, whose tensors have a prefix."""
        latent, heads = mixer.latent, mixer.heads
        assert latent is not None
        queries, key = order_queries(latent, heads), order_key(latent)
        if latent.query_rank:
            own = {f"{prefix}.q_a_proj": latent.query_rank}
            order = [torch.arange(latent.query_rank), key]
        else:
            own, order = {f"{prefix}.q_proj": heads * latent.query}, [queries, key]
        parts = {**own, f"{prefix}.kv_a_proj_with_mqa": latent.kept}
        return {
            "qkv": self.tensors.load_matrix(parts, self.hidden, order),
            "qkv_bias": None,
            "output": self.tensors.load_matrix({f"{prefix}.o_proj": self.hidden}, mixer.out_size),
            "output_bias": None,
            "head_norm": None,
            "attention": AttentionOptions(mixer.scale, kv_scales=kv_scales),
            "latent": self._load_latent(latent, heads, prefix, [queries]),
        }

    def _load_latent(self, latent: Latent, heads: int, prefix: str, order: Sequence[Tensor]) -> LatentWeights:
        query_norm = query = None
        if latent.query_rank:
            rows, rank = heads * latent.query, latent.query_rank
            query_norm = self.tensors.read_norm(f"{prefix}.q_a_layernorm", rank)
            query = self.tensors.load_matrix({f"{prefix}.q_b_proj": rows}, rank, order)
        norm = self.tensors.read_norm(f"{prefix}.kv_a_layernorm", latent.rank)
        size = latent.nope + latent.value
        joined = self.tensors.read(f"{prefix}.kv_b_proj.weight", heads * size, latent.rank)
        keys, values = joined.view(heads, size, latent.rank).split([latent.nope, latent.value], dim=1)
        return LatentWeights(query_norm, query, Expansion(norm, keys, values))


def order_queries(latent: Latent, heads: int) -> Tensor:
    """Return the rows of queries, each head's of the part to rotate with the first of each pair before the others."""
    own = torch.cat((torch.arange(latent.nope), latent.nope + separate_pairs(latent.rope)))
    return (torch.arange(heads)[:, None] * latent.query + own).flatten()


def order_key(latent: Latent) -> Tensor:
    """Return the rows of what tokens keep, likewise."""
    return torch.cat((torch.arange(latent.rank), latent.rank + separate_pairs(latent.rope)))
