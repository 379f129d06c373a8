# SPDX-License-Identifier: Apache-2.0
"""Where a GGUF file has the tensors of Hugging Face's names, and in which order their rows and columns are there."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import gguf
import torch
from torch import Tensor

from blink.models.families import FAMILIES
from blink.models.spec import ModelSpec
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.gguf_metadata import find_gguf_arch
from blink.models.weights.head_order import ungroup, untile, widen

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)(\..+)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_STORED_LAYER = re.compile(r"blk\.(\d+)\..+")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the file, or a part of one."""

    stored: str
    expert: int | None = None  # of a tensor that holds all experts'
    rows: Tensor | None = None  # which of the stored rows is each row; None: each is where it was
    num_rows: int = 0  # that are stored, where `rows` are some of them
    heads: Tensor | None = None  # likewise of columns, by heads of one size


class GgufPlaces:
    """The places of a model's tensors."""

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self._tensors = file.tensors
        self._spec = spec
        self._family = FAMILIES[spec.architecture]
        self._names = gguf.get_tensor_name_map(find_gguf_arch(file), spec.num_layers)

    def count_drafts(self) -> int:
        """Return how many tensors belong to layers behind the last, which predict further tokens."""
        layers = (match[1] for name in self._tensors if (match := _STORED_LAYER.fullmatch(name)))
        return sum(int(layer) >= self._spec.num_layers for layer in layers)

    def find(self, name: str) -> Place:
        """Return where a tensor of the model is, or should be."""
        if found := _EXPERT.fullmatch(name):
            return self._find_expert(found[1] + found[3], int(found[2]))
        match = _LAYER.fullmatch(name)
        if match is None:
            return Place(self._name(name))
        layer, part = int(match[1]), match[2]
        if part.startswith("linear_attn."):
            return self._find_recurrent(name, part.split(".")[1], layer)
        mixer = self._spec.layers[layer].mixer
        place = Place(self._name(name))
        if self._family.is_interleaved and mixer.attention is not None:
            heads = {"q_proj": mixer.attention.heads, "k_proj": mixer.attention.kv_heads}
            block, _, matrix = part.partition(".")
            num_heads = heads.get(matrix.split(".")[0]) if block == "self_attn" else None
            if num_heads is not None:
                return _take_rows(place, _uninterleave(num_heads, mixer.attention.head_dim))
        return place

    def _name(self, name: str) -> str:
        stored = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        return stored

    def _find_expert(self, name: str, expert: int) -> Place:
        """Return an expert's matrix; files may have gate and up matrices in one tensor."""
        stored = self._name(name)
        joined = re.sub("_(gate|up)_exps", "_gate_up_exps", stored)
        if stored in self._tensors or joined not in self._tensors:
            return Place(stored, expert)
        gates, ups = torch.arange(self._tensors[joined].shape[1]).tensor_split(2)
        return Place(joined, expert, gates if "gate_exps" in stored else ups, len(gates) + len(ups))

    def _find_recurrent(self, name: str, part: str, layer: int) -> Place:
        if self._family.has_grouped_projections:
            return self._find_grouped(name, part, layer)
        mixer = self._spec.layers[layer].mixer.recurrence
        assert mixer is not None
        place = Place(self._name(name.replace(".dt_bias", ".dt_proj.bias")))
        if not self._family.has_tiled_heads or mixer.k_heads == mixer.v_heads:
            return place
        order = untile(mixer.k_heads, mixer.v_heads)
        if part == "out_proj":
            return replace(place, heads=order)
        values = widen(order, mixer.v_dim)
        keys = mixer.channels - len(values)
        channels = torch.cat((torch.arange(keys), keys + values))
        per_head = dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), order)
        orders = {"in_proj_qkv": channels, "conv1d": channels, "in_proj_z": values, **per_head}
        return _take_rows(place, orders[part]) if part in orders else place

    def _find_grouped(self, name: str, part: str, layer: int) -> Place:
        """Return a part of projections that are grouped by key head, as in files of qwen3next; newer ones group b and a
        alone."""
        mixer = self._spec.layers[layer].mixer.recurrence
        assert mixer is not None
        repeats = mixer.v_heads // mixer.k_heads
        if part in ("in_proj_b", "in_proj_a"):
            b, a = ungroup(mixer.k_heads, [repeats, repeats])
            place = Place(self._name(name.replace(part, "in_proj_ba")))
            return replace(place, rows=b if part == "in_proj_b" else a, num_rows=2 * mixer.v_heads)
        place = Place(self._name(name.replace(".dt_bias", ".dt_proj.bias")))
        if part not in ("in_proj_qkv", "in_proj_z") or place.stored in self._tensors:
            return place
        values = repeats * mixer.v_dim
        *qkv, z = ungroup(mixer.k_heads, [mixer.k_dim, mixer.k_dim, values, values])
        rows = z if part == "in_proj_z" else torch.cat(qkv)
        return Place(self._name(name.replace(part, "in_proj_qkvz")), rows=rows, num_rows=mixer.in_size)


def _take_rows(place: Place, rows: Tensor) -> Place:
    """Return a place all of whose rows are in another order."""
    return replace(place, rows=rows, num_rows=len(rows))


def _uninterleave(heads: int, head_dim: int) -> Tensor:
    """Return the rows of heads whose two halves llama.cpp's rotary kernel for llama wants interleaved."""
    return torch.arange(heads * head_dim).view(heads, -1, 2).transpose(1, 2).flatten()
