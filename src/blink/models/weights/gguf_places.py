# SPDX-License-Identifier: Apache-2.0
"""Where a GGUF file has the tensors of Hugging Face's names, and in which order their rows and columns are there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import gguf
import torch
from torch import Tensor

from blink.models.families import FAMILIES
from blink.models.layers import GatedDeltaNet
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
                head_dim = mixer.attention.head_dim
                return self._reorder(place, num_heads * head_dim, lambda: _uninterleave(num_heads, head_dim))
        return place

    def find_expansion(self, name: str) -> dict[str, tuple[int, int, int]]:
        """Return the tensors that a file has instead of one that makes keys and values of latents, with their shapes.

        The first has each head's matrix for keys transposed. None if it has the one.
        """
        match = _LAYER.fullmatch(name)
        if match is None or match[2] != "self_attn.kv_b_proj.weight" or self._name(name) in self._tensors:
            return {}
        mixer = self._spec.layers[int(match[1])].mixer.attention
        assert mixer is not None and mixer.latent is not None
        latent, heads = mixer.latent, mixer.heads
        keys, values = (self._name(name.replace("kv_b", part)) for part in ("k_b", "v_b"))
        return {keys: (heads, latent.rank, latent.nope), values: (heads, latent.value, latent.rank)}

    def _reorder(self, place: Place, num_rows: int, choose: Callable[[], Tensor]) -> Place:
        """Return a place with the rows that `choose` gives out of so many.

        They are not chosen where the file has another number, which may be any: the check of the shape refuses it.
        """
        tensor = self._tensors.get(place.stored)
        fits = tensor is not None and tensor.shape[0] == num_rows
        return replace(place, rows=choose() if fits else torch.empty(0, dtype=torch.int64), num_rows=num_rows)

    def _name(self, name: str) -> str:
        name = name.replace("_correction_bias", "_correction.bias")
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

    def _find_delta_net(self, layer: int) -> GatedDeltaNet:
        recurrence = self._spec.layers[layer].mixer.recurrence
        assert recurrence is not None and recurrence.delta_net is not None
        return recurrence.delta_net

    def _find_recurrent(self, name: str, part: str, layer: int) -> Place:
        if self._family.has_grouped_projections:
            return self._find_grouped(name, part, layer)
        mixer = self._find_delta_net(layer)
        place = Place(self._name(name.replace(".dt_bias", ".dt_proj.bias")))
        if not self._family.has_tiled_heads or mixer.k_heads == mixer.v_heads:
            return place
        if part == "out_proj":
            tensor = self._tensors.get(place.stored)
            fits = tensor is not None and tensor.shape[-1] == mixer.out_size
            return replace(place, heads=untile(mixer.k_heads, mixer.v_heads)) if fits else place
        if part == "in_proj_z":
            return self._reorder(
                place, mixer.out_size, lambda: _order_values(mixer.k_heads, mixer.v_heads, mixer.v_dim)
            )
        if part in ("in_proj_qkv", "conv1d"):
            keys, sizes = mixer.channels - mixer.out_size, (mixer.k_heads, mixer.v_heads, mixer.v_dim)
            return self._reorder(
                place, mixer.channels, lambda: torch.cat((torch.arange(keys), keys + _order_values(*sizes)))
            )
        if part in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
            return self._reorder(place, mixer.v_heads, lambda: untile(mixer.k_heads, mixer.v_heads))
        return place

    def _find_grouped(self, name: str, part: str, layer: int) -> Place:
        """Return a part of projections that are grouped by key head, as in files of qwen3next; newer ones group b and a
        alone."""
        mixer = self._find_delta_net(layer)
        repeats = mixer.v_heads // mixer.k_heads
        if part in ("in_proj_b", "in_proj_a"):
            place, index = Place(self._name(name.replace(part, "in_proj_ba"))), int(part == "in_proj_a")
            return self._reorder(place, 2 * mixer.v_heads, lambda: ungroup(mixer.k_heads, [repeats, repeats])[index])
        place = Place(self._name(name.replace(".dt_bias", ".dt_proj.bias")))
        if part not in ("in_proj_qkv", "in_proj_z") or place.stored in self._tensors:
            return place
        values = repeats * mixer.v_dim
        parts = slice(3, 4) if part == "in_proj_z" else slice(0, 3)
        sizes = [mixer.k_dim, mixer.k_dim, values, values]
        place = Place(self._name(name.replace(part, "in_proj_qkvz")))
        return self._reorder(place, mixer.in_size, lambda: torch.cat(ungroup(mixer.k_heads, sizes)[parts]))


def _order_values(k_heads: int, v_heads: int, size: int) -> Tensor:
    """Return where each row of values is whose heads are tiled."""
    return widen(untile(k_heads, v_heads), size)


def _uninterleave(heads: int, head_dim: int) -> Tensor:
    """Return the rows of heads whose pairs llama.cpp's rotary kernel for llama wants to be neighbours."""
    return torch.arange(heads * head_dim).view(heads, -1, 2).transpose(1, 2).flatten()
