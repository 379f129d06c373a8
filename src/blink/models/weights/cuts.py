# SPDX-License-Identifier: Apache-2.0
"""Which rows or columns of each tensor a rank of a tensor-parallel group has, by the tensor's name.

What makes heads, gates and the vocabulary is cut by rows. What is projected back to the hidden size is cut by columns:
its results are partial, and ranks sum them. Their biases belong to the first rank. All else every rank has whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blink.formats.base import StoredMatrix
from blink.models.families import FAMILIES
from blink.models.layers import Attention, GatedDeltaNet
from blink.models.mamba import Mamba2
from blink.models.mlps import MoeMlp
from blink.models.shard import Shard
from blink.models.spec import ModelSpec

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"((?:.+\.)?experts\.)(\d+)(\.(.+)\.weight)")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank takes of a dimension of a tensor."""

    dim: int
    size: int  # of the whole dimension
    indices: Tensor  # int64

    def take(self, whole: Tensor) -> Tensor:
        """Return the rank's part of a tensor."""
        return whole.index_select(self.dim, self.indices.to(whole.device))

    def take_matrix(self, whole: StoredMatrix) -> StoredMatrix:
        """Return the rank's part of a stored matrix [out, in]."""
        if self.dim == 0:
            return whole.take_rows(self.indices)
        return whole.take_columns(self.take_range(self.size))

    def take_expert(self, whole: StoredMatrix) -> StoredMatrix:
        """Return the rank's part of a matrix of a tensor of all experts' [experts, in, out]."""
        if self.dim == 0:
            return whole
        return whole.take_rows(self.indices) if self.dim == 2 else whole.take_columns(self.take_range(self.size))

    def take_range(self, columns: int) -> range:
        """Return which columns of a matrix are the rank's, which follow each other."""
        return range(columns) if self.dim == 0 else range(int(self.indices[0]), int(self.indices[-1]) + 1)

    def widen(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor whose part has a shape."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Whole:
    """All of a tensor, or zeros on ranks but the first of what is added to a sum once."""

    is_zero: bool = False

    def take(self, whole: Tensor) -> Tensor:
        """Return the rank's tensor."""
        return torch.zeros_like(whole) if self.is_zero else whole

    def take_matrix(self, whole: StoredMatrix) -> StoredMatrix:
        """Return the rank's matrix."""
        assert not self.is_zero
        return whole

    def take_expert(self, whole: StoredMatrix) -> StoredMatrix:
        """Return the matrix, which is the rank's."""
        return whole

    def take_range(self, columns: int) -> range:
        """Return all columns of a matrix."""
        return range(columns)

    def widen(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the same shape."""
        return tuple(shape)


class Cuts:
    """The cuts of one rank."""

    def __init__(self, spec: ModelSpec, shard: Shard, block: int) -> None:
        """Cut for a rank a whole model; block: columns that cannot be parted."""
        self.shard = shard
        self._spec, self._block = spec, block
        self._once = Whole(is_zero=shard.rank > 0)
        self._family = FAMILIES[spec.architecture]

    def find(self, name: str) -> Cut | Whole:
        """Return what the rank takes of a tensor."""
        return self._find(name) or Whole()

    def _find(self, name: str) -> Cut | Whole | None:
        if name in _VOCABULARY:
            return _cut(0, self._spec.vocab_size, [self.shard.take_rows(self._spec.vocab_size)])
        match = _LAYER.fullmatch(name)
        if match is None:
            return None
        layer, (block, _, part) = self._spec.layers[int(match[1])], match[2].partition(".")
        if block == self._family.recurrent_block and layer.mixer.recurrence is not None:
            return self._find_recurrent(layer.mixer.recurrence, *part.rsplit(".", 1))
        if block == "self_attn" and layer.mixer.attention is not None:
            return self._find_attention(layer.mixer.attention, *part.partition(".")[::2])
        mixture, dense = layer.mlp.mixture, layer.mlp.dense
        if ".experts." in name:
            return None if mixture is None else self._find_experts(mixture, match[2])
        _, matrix, kind = f"..{match[2]}".rsplit(".", 2)
        return None if dense is None else self._find_dense(dense.size, matrix, kind)

    def find_owners(self, name: str) -> list[str]:
        """Return an expert's tensor of each rank, in the ranks' order, where each rank has whole ones; else none."""
        match = _EXPERT.fullmatch(name)
        if match is None or not self._count_held(name):
            return []
        return [f"{match[1]}{number}{match[3]}" for number in self.find_numbers(name, int(match[2]))]

    def find_numbers(self, name: str, expert: int) -> list[int]:
        """Return the number of an expert of each rank, where each rank has whole ones; else of that all have parts of.

        name: of one of its tensors, or of one of all experts.
        """
        held = self._count_held(name)
        return [rank * held + expert for rank in range(self.shard.size)] if held else [expert]

    def _count_held(self, name: str) -> int:
        """Return how many whole experts each rank has; 0: parts of all."""
        layer = _LAYER.fullmatch(name)
        mixture = None if layer is None else self._spec.layers[int(layer[1])].mlp.mixture
        return 0 if mixture is None else mixture.split(self.shard.size, self._block).held

    def _find_attention(self, mixer: Attention, name: str, kind: str) -> Cut | Whole | None:
        """Cut a tensor of attention; kind: how its name ends, as "weight"."""
        if name == "o_proj":
            return self._once if kind == "bias" else self._cut_heads(1, [(mixer.heads, mixer.out_size)])
        if mixer.latent is not None:
            latent, heads = mixer.latent, mixer.heads
            sizes = {"q_proj": latent.query, "q_b_proj": latent.query, "kv_b_proj": latent.nope + latent.value}
            return self._cut_heads(0, [(heads, heads * sizes[name])]) if name in sizes else None
        queries = (mixer.heads, (1 + mixer.output_gate) * mixer.q_size)
        keys = (mixer.kv_heads, mixer.kv_size)
        rows = {"q_proj": [queries], "k_proj": [keys], "v_proj": [keys], "qkv_proj": [queries, keys, keys]}
        rows["sinks"] = [(mixer.heads, mixer.heads)]
        if mixer.qk_norm == "all_heads":
            rows |= {"q_norm": [(mixer.heads, mixer.q_size)], "k_norm": [keys]}
        return self._cut_heads(0, rows[name]) if name in rows else None

    def _find_recurrent(self, mixer: GatedDeltaNet | Mamba2, name: str, kind: str = "") -> Cut | None:
        if kind not in ("weight", "bias"):
            name = kind or name
        if mixer.mamba is not None:
            heads, size, whole = mixer.mamba.heads, mixer.out_size, mixer.mamba.groups * mixer.mamba.state_size
            pairs = (mixer.mamba.groups, whole)
            channels, norm, groups = [(heads, size), pairs, pairs], [(heads, size)], heads
        else:
            assert mixer.delta_net is not None
            heads, size = mixer.delta_net.v_heads, mixer.out_size
            groups = mixer.delta_net.k_heads
            keys = (groups, groups * mixer.delta_net.k_dim)
            channels, norm = [keys, keys, (heads, size)], []
        if name == "out_proj":
            return self._cut_heads(1, [(heads, size)])
        of_each = [(heads, heads)]
        rows = {
            "in_proj_qkv": channels, "in_proj_xbc": channels, "conv1d": channels, "in_proj_z": [(heads, size)],
            "in_proj_b": of_each, "in_proj_a": of_each, "in_proj_dt": of_each, "A_log": of_each, "dt_bias": of_each,
            "D": of_each, "norm": norm, "in_proj_qkvz": [(groups, mixer.in_size)], "in_proj_ba": [(groups, 2 * heads)],
        }  # fmt: skip
        return self._cut_heads(0, rows[name]) if rows.get(name) else None

    def _find_experts(self, mlp: MoeMlp, name: str) -> Cut | Whole | None:
        assert self._family.experts is not None
        whole, size = self.shard.take(mlp.experts), mlp.size
        has_parts = not mlp.split(self.shard.size, self._block).held
        part = self.shard.take(size) if has_parts else None
        if match := _EXPERT.fullmatch(name):
            dim = int(match[4] == self._family.experts.projections[2])
            return None if part is None else _cut(dim, size, [part])
        tensor = name.rpartition(".")[2]
        if part is None:
            return _cut(0, mlp.experts, [whole])
        if tensor == "down_proj_bias":
            return self._once
        if tensor == "down_proj":
            return _cut(1, size, [part])
        pairs = range(2 * part.start, 2 * part.stop)  # rows of gate and up alternate
        return _cut(2 if tensor == "gate_up_proj" else 1, 2 * size, [pairs])

    def _find_dense(self, size: int, name: str, kind: str) -> Cut | Whole | None:
        if name == "down_proj":
            return self._once if kind == "bias" else _cut(1, size, [self.shard.take(size)])
        own = self.shard.take(size)
        if name == "gate_up_proj":
            return _cut(0, 2 * size, [own, range(size + own.start, size + own.stop)])
        return _cut(0, size, [own]) if name in ("gate_proj", "up_proj") else None

    def _cut_heads(self, dim: int, parts: Iterable[tuple[int, int]]) -> Cut:
        """Cut a dimension that consists of parts, each of a number of heads and a size."""
        found: list[range] = []
        start = 0
        for heads, size in parts:
            own, width = self.shard.take_heads(heads), size // heads
            found.append(range(start + own.start * width, start + own.stop * width))
            start += size
        return _cut(dim, start, found)


def _cut(dim: int, size: int, parts: Sequence[range]) -> Cut:
    return Cut(dim, size, torch.cat([torch.arange(part.start, part.stop) for part in parts]))
