# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: GGUF, safetensors or random numbers, all under the names of Hugging Face's llama."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import gguf
import torch
from safetensors import safe_open
from torch import Tensor

from blink.errors import ConfigError
from blink.fields import one_line
from blink.formats.base import QuantizedEmbedding
from blink.formats.gguf import GgufRows
from blink.kernels.cpu.gguf_weight import GgufWeight
from blink.models.families import FAMILIES
from blink.models.spec import ModelSpec
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.gguf_metadata import find_gguf_arch
from blink.models.weights.shards import list_shards

# How names begin in files of a model that sees pictures too, or whose decoder is a part.
_TEXT_PARTS = ("language_model.model.", "model.language_model.", "model.decoder.", "decoder.")
_WIDE_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPERT_NAME = re.compile(r"(.+\.experts)\.(\d+)(\..+)")
_PLACED_NAME = re.compile(r"(layers\.\d+\.)?(.+)(\.[^.]+)")


class Checkpoint(Protocol):
    """A source of weights."""

    norm_shift: float  # what is missing in the norms of a family that stores their weights minus 1

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor that may be there, as it is stored, in place of those that usually are.

        None: there is none, as in GGUF files and of random weights.
        """
        ...

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor of that name and shape, before memory is taken for it.

        Raises:
            ConfigError: there is not.
        """
        ...

    def fill(self, name: str, target: Tensor) -> None:
        """Write the named tensor, which check() has found, to target, converted to its dtype.

        target may be a view of another shape, with the elements in the same order.

        Raises:
            ConfigError: it cannot be read.
        """
        ...

    def read_quantized(self, names: Sequence[str]) -> QuantizedEmbedding | None:
        """Return matrices that check() has found, one below the other, as stored; None: they have to be filled."""
        ...


@dataclass(frozen=True, slots=True)
class KeepBlocks:
    """How matrices stay quantised: what makes a weight of rows as a file holds them, and of a number of columns."""

    make: Callable[[Sequence[GgufRows], int], QuantizedEmbedding]
    takes_experts: bool


KEEP_ON_CPU = KeepBlocks(GgufWeight, takes_experts=True)


class GgufCheckpoint:
    """Weights of a GGUF file, dequantised or as they are stored."""

    norm_shift = 0.0  # converters add it

    def __init__(self, path: Path, spec: ModelSpec, keep: KeepBlocks | None = None) -> None:
        """Open a file; keep: makes weights of matrices that stay quantised where there are kernels; None: none do."""
        self._file = GgufFile(path)
        self._keep = keep
        self._spec = spec
        self._is_interleaved = FAMILIES[spec.architecture].is_interleaved
        self._names = gguf.get_tensor_name_map(find_gguf_arch(self._file), spec.num_layers)

    def shape(self, name: str) -> None:
        """Find none but the usual tensors."""

    def check(self, name: str, shape: Sequence[int]) -> None:
        stored, expert = self._find_name(name)
        if stored not in self._file.tensors:
            raise ConfigError(f"{self._file.path} has no tensor '{stored}'; download or convert the model again.")
        found = self._file.tensors[stored].shape
        if expert is not None:
            if expert >= found[0]:
                raise ConfigError(f"{self._file.path}: '{stored}' has {found[0]} experts, so no number {expert}.")
            found = found[1:]
        _check_shape(found, shape, f"{self._file.path}: '{stored}'")

    def fill(self, name: str, target: Tensor) -> None:
        stored, expert = self._find_name(name)
        values = self._restore_order(stored, torch.from_numpy(self._file.read_tensor(stored, expert)))
        target.copy_(values.view(target.shape))

    def read_quantized(self, names: Sequence[str]) -> QuantizedEmbedding | None:
        places = [self._find_name(name) for name in names]
        tensors = [self._file.tensors[stored] for stored, _ in places]
        if self._keep is None or not all(tensor.can_stay_quantized for tensor in tensors):
            return None
        if not self._keep.takes_experts and any(expert is not None for _, expert in places):
            return None
        parts: list[GgufRows] = []
        for (stored, expert), tensor in zip(places, tensors, strict=True):
            # A copy: a file that is mapped may shrink, which would end the process.
            rows = torch.from_numpy(self._file.read_rows(stored, expert).copy())
            parts.append(GgufRows(int(tensor.kind), self._restore_order(stored, rows)))
        return self._keep.make(parts, tensors[0].shape[-1])

    def _restore_order(self, stored: str, values: Tensor) -> Tensor:
        """Undo llama.cpp's interleaving of each head's two halves, which its rotary kernel for llama wants."""
        if not (self._is_interleaved and stored.startswith("blk.") and ".attn_" in stored):
            return values
        _, layer, part = stored.split(".")[:3]
        attention = self._spec.layers[int(layer)].mixer.attention
        assert attention is not None
        num_heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads}.get(part)
        if num_heads is None:
            return values
        return values.view(num_heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Return all tensors by their names in the file, one entry of the first dimension after the other."""
        for name, tensor in self._file.tensors.items():
            for entry in range(tensor.shape[0]) if len(tensor.shape) > 2 else (None,):
                yield name, torch.from_numpy(self._file.read_tensor(name, entry))

    def _find_name(self, name: str) -> tuple[str, int | None]:
        """Return a tensor's name in the file, and which entry of it is meant where it holds all experts."""
        expert = None
        if found := _EXPERT_NAME.fullmatch(name):
            name, expert = found[1] + found[3], int(found[2])
        stored = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        return stored, expert


class SafetensorsCheckpoint:
    """Weights of a Hugging Face directory, in one or several safetensors files."""

    norm_shift = 1.0

    def __init__(self, directory: Path, names: Mapping[str, str] | None = None) -> None:
        """Open a directory's files; names: Family.tensor_names."""
        self._directory = directory
        self._names = names or {}
        self._owners: dict[str, safe_open] = {}
        for path in list_shards(directory):
            try:
                # Open for as long as the checkpoint: the file is mapped, not read.
                shard = safe_open(path, framework="pt")
            except Exception as error:  # the library's error type is not public
                raise ConfigError(f"{path} is not a readable safetensors file ({one_line(error)}).") from error
            self._owners.update(dict.fromkeys(shard.keys(), shard))
        found = (prefix for prefix in _TEXT_PARTS if f"{prefix}embed_tokens.weight" in self._owners)
        self._prefix = next(found, "model.")

    def check(self, name: str, shape: Sequence[int]) -> None:
        name = self._find_name(name)
        if name not in self._owners:
            raise ConfigError(f"{self._directory} has no tensor '{name}'; download the model again.")
        found = self._owners[name].get_slice(name).get_shape()
        _check_shape(found, shape, f"{self._directory}: '{name}'")

    def fill(self, name: str, target: Tensor) -> None:
        target.copy_(self.read(name, _WIDE_TYPES).view(target.shape))

    @property
    def place(self) -> str:
        """The directory, for messages."""
        return str(self._directory)

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""
        return self._find_name(name) in self._owners

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape, None if there is none."""
        name = self._find_name(name)
        return tuple(self._owners[name].get_slice(name).get_shape()) if name in self._owners else None

    def read(self, name: str, types: Sequence[torch.dtype], entry: int | None = None) -> Tensor:
        """Return a tensor as it is stored, in one of these types, or one entry of its first dimension.

        Raises:
            ConfigError: it is of another type, or cannot be read.
        """
        name = self._find_name(name)
        try:
            file = self._owners[name]
            values = file.get_tensor(name) if entry is None else file.get_slice(name)[entry]
        except Exception as error:  # as above
            raise ConfigError(f"{self._directory}: '{name}' cannot be read ({one_line(error)}).") from error
        if values.dtype not in types:
            raise ConfigError(f"{self._directory}: '{name}' has type {values.dtype}, which is not supported.")
        return values

    def read_quantized(self, names: Sequence[str]) -> None:
        """Fill all."""

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Return all tensors by their names, as they are stored."""
        for name, file in self._owners.items():
            yield name, file.get_tensor(name)

    def _find_name(self, name: str) -> str:
        if not name.startswith("model."):
            own = f"language_model.{name}"
            return own if own in self._owners else name
        name = name.removeprefix("model.")
        found = _PLACED_NAME.fullmatch(name)
        if found is not None and found[2] in self._names:
            name = f"{found[1] or ''}{self._names[found[2]]}{found[3]}"
        return self._prefix + name


class DummyCheckpoint:
    """Random weights, equal for equal seeds and devices."""

    norm_shift = 0.0

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def shape(self, name: str) -> None:
        """Find none but the usual tensors."""

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Find a tensor of every name and shape."""

    def fill(self, name: str, target: Tensor) -> None:
        if name.endswith("norm.weight"):
            target.fill_(1)
        else:
            target.normal_(std=0.02, generator=self._generator)

    def read_quantized(self, names: Sequence[str]) -> None:
        """Fill all."""


def _check_shape(found: Sequence[int], wanted: Sequence[int], place: str) -> None:
    if tuple(found) != tuple(wanted):
        raise ConfigError(
            f"{place} has shape {tuple(found)}, but the model's description asks for {tuple(wanted)};"
            " the files do not belong together."
        )
