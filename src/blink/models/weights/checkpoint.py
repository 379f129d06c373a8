# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: GGUF, safetensors or random numbers, all under the names of Hugging Face's llama."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import gguf
import numpy as np
import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.fields import one_line
from blink.formats.base import QuantizedEmbedding
from blink.formats.gguf import GgufRows
from blink.formats.gguf_experts import GgufExperts
from blink.models.families import FAMILIES
from blink.models.spec import ModelSpec
from blink.models.weights.gguf_file import GgufFile, GgufTensor
from blink.models.weights.gguf_places import GgufPlaces, Place
from blink.models.weights.kept_blocks import KeepBlocks, StoredRows
from blink.models.weights.stored_tensors import Stored, open_tensors, split_tensors

if TYPE_CHECKING:
    from blink.models.weights.quantized_checkpoint import MatrixCheckpoint

# How names begin in files of a model that sees pictures too, or whose decoder is a part.
_TEXT_PARTS = ("language_model.model.", "model.language_model.", "model.decoder.", "decoder.", "")
_MTP = "mtp."  # how names begin of a layer that predicts one token further, see Family.has_mtp
_WIDE_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DRAWN_ROWS = 8192  # of a random table in the host's memory, at once
_BY_COLUMNS = re.compile(r"\.(attn_output|ffn_down|ssm_out)")  # names in GGUF files
_PLACED_NAME = re.compile(r"(layers\.\d+\.)?(.+)(\.[^.]+)")


class Checkpoint(Protocol):
    """A source of weights."""

    norm_shift: float  # what is missing in the norms of a family that stores their weights minus 1
    # Whether a family's own order of rows, and projections that it has grouped by heads, come as in its files.
    keeps_groups: bool
    stored_rows: GgufCheckpoint | None  # what gives matrices as stored, if they stay quantized on the device

    @property
    def matrices(self) -> MatrixCheckpoint | None:
        """What gives matrices in their format, for a GPU that multiplies them so; None: nothing does."""
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

    def read_quantized(self, names: Sequence[str], order: Sequence[Tensor] | None = None) -> QuantizedEmbedding | None:
        """Return matrices that check() has found, one below the other, as stored; None: they have to be filled.

        order: which rows of each to take; None: all, as they are.
        """
        ...


class GgufCheckpoint:
    """Weights of a GGUF file, dequantised or as they are stored."""

    norm_shift = 0.0  # converters add it
    matrices = None
    keeps_groups = False

    def __init__(self, path: Path, spec: ModelSpec, keep: KeepBlocks | None = None) -> None:
        """Open a file; keep: makes weights of matrices that stay quantised where there are kernels; None: none do."""
        self._file = GgufFile(path)
        self._file.prefetch()
        self._keep = keep
        self._places = GgufPlaces(self._file, spec)
        self.num_drafts = self._places.count_drafts()
        self.stored_rows: GgufCheckpoint | None = None if keep is None else self

    def check(self, name: str, shape: Sequence[int]) -> None:
        if parts := self._places.find_expansion(name):
            for stored, sizes in parts.items():
                _check_shape(self._find_shape(stored), sizes, f"{self._file.path}: '{stored}'")
            return
        place = self._places.find(name)
        found = self._find_shape(place.stored)
        if place.expert is not None:
            if place.expert >= found[0]:
                raise ConfigError(
                    f"{self._file.path}: '{place.stored}' has {found[0]} experts, so no number {place.expert}."
                )
            found = found[1:]
        wanted = shape if place.rows is None else (place.num_rows, *shape[1:])
        # Converters leave dimensions of 1 out.
        found, wanted = (tuple(size for size in sizes if size != 1) for sizes in (found, wanted))
        _check_shape(found, wanted, f"{self._file.path}: '{place.stored}'")

    def _find_shape(self, stored: str) -> tuple[int, ...]:
        if stored not in self._file.tensors:
            raise ConfigError(f"{self._file.path} has no tensor '{stored}'; download or convert the model again.")
        return self._file.tensors[stored].shape

    def fill(self, name: str, target: Tensor) -> None:
        if parts := self._places.find_expansion(name):
            keys, values = (torch.from_numpy(self._file.read_tensor(stored)) for stored in parts)
            target.copy_(torch.cat((keys.transpose(1, 2), values), 1).view(target.shape))
            return
        place = self._places.find(name)
        values = _reorder(torch.from_numpy(self._file.read_tensor(place.stored, place.expert)), place)
        if name.endswith(".A_log"):  # files have -exp() of it
            values = values.neg().log()
        target.copy_(values.view(target.shape))

    def read_quantized(self, names: Sequence[str], order: Sequence[Tensor] | None = None) -> QuantizedEmbedding | None:
        found = self.read_rows(names)
        return None if found is None else self.keep(*found, order)

    def keep(
        self,
        parts: Sequence[GgufRows],
        columns: int,
        order: Sequence[Tensor] | None = None,
        device: torch.device | None = None,
    ) -> QuantizedEmbedding:
        """Return a weight of what read_rows() has returned, or of parts of it.

        order: which rows of each; device: if not the checkpoint's.
        """
        assert self._keep is not None
        if order is not None:
            pairs = zip(parts, order, strict=True)
            parts = [GgufRows(part.format, part.blocks.index_select(0, rows)) for part, rows in pairs]
        return self._keep.make(parts, columns, device or self._keep.device)

    def count_block(self) -> int:
        """Return how many columns of a row cannot be parted, of the matrices that ranks part by columns."""
        tensors = (tensor for name, tensor in self._file.tensors.items() if _BY_COLUMNS.search(name))
        on_gpu = self._keep is not None and self._keep.on_gpu
        kinds = {tensor.kind for tensor in tensors if tensor.can_stay_quantized(on_gpu=on_gpu)}
        return max((gguf.GGML_QUANT_SIZES[kind][0] for kind in kinds), default=1)

    def read_rows(self, names: Sequence[str]) -> StoredRows | None:
        """Return matrices that check() has found, as stored; None: they have to be filled."""
        places = [self._places.find(name) for name in names]
        if self._keep is None or not self._can_stay(places):
            return None
        if self._keep.on_gpu and any(place.expert is not None for place in places):
            return None
        return StoredRows(self._read_parts(places), self._file.tensors[places[0].stored].shape[-1])

    def read_experts(
        self, names: Sequence[Sequence[str]], shape: tuple[int, int, int], allocate: Callable[..., Tensor]
    ) -> GgufExperts | None:
        """Return matrices of all experts, each expert's one below the other, as a GPU keeps them; None: it does not.

        shape: experts, rows and columns; allocate: takes a shape and a dtype.
        """
        places = [[self._places.find(name) for name in own] for own in names]
        if self._keep is None or self._keep.make_experts is None or not self._can_stay(places[0]):
            return None
        return self._keep.make_experts(map(self._read_parts, places), shape, allocate, self._keep.device)

    def _can_stay(self, places: Sequence[Place]) -> bool:
        assert self._keep is not None
        tensors = (self._file.tensors[place.stored] for place in places)
        return all(_can_stay(tensor, place, self._keep) for tensor, place in zip(tensors, places, strict=True))

    def _read_parts(self, places: Sequence[Place]) -> list[GgufRows]:
        """Return matrices as stored."""
        parts: list[GgufRows] = []
        for place in places:
            rows = _view_stored(self._file.read_rows(place.stored, place.expert))
            parts.append(GgufRows(int(self._file.tensors[place.stored].kind), _reorder(rows, place)))
        return parts

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Return all tensors by their names in the file, one entry of the first dimension after the other."""
        for name, tensor in self._file.tensors.items():
            for entry in range(tensor.shape[0]) if len(tensor.shape) > 2 else (None,):
                yield name, torch.from_numpy(self._file.read_tensor(name, entry))


def _view_stored(rows: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """Return rows where the file is mapped: they take no memory of the process. Nothing may write to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what is read-only
        return torch.from_numpy(rows)


def _can_stay(tensor: GgufTensor, place: Place, keep: KeepBlocks) -> bool:
    """Tell whether a matrix can stay quantised: no block of it may hold columns of two heads that are to be moved."""
    is_whole = place.heads is None or tensor.shape[-1] // len(place.heads) % gguf.GGML_QUANT_SIZES[tensor.kind][0] == 0
    return is_whole and tensor.can_stay_quantized(on_gpu=keep.on_gpu)


def _reorder(values: Tensor, place: Place) -> Tensor:
    """Return a stored tensor's rows, numbers or bytes, in the order of Hugging Face's files."""
    if place.rows is not None:
        values = values.index_select(0, place.rows)  # rows of bytes, for which indexing takes a hundred times as long
    if place.heads is not None:
        values = values.unflatten(1, (len(place.heads), -1))[:, place.heads].flatten(1)
    return values


class SafetensorsCheckpoint:
    """Weights of a Hugging Face directory, in one or several safetensors files."""

    norm_shift = 1.0
    keeps_groups = True
    matrices = None

    stored_rows: GgufCheckpoint | None = None

    def __init__(
        self, directory: Path, spec: ModelSpec | None = None, newer: Sequence[Path] = (), *, is_mtp: bool = False
    ) -> None:
        """Open a directory's files.

        spec: of the model, whose experts are to have the usual names; None: as stored. newer: files with tensors that
        stand for the directory's own. is_mtp: take the layer that predicts one token further, as a model of one layer.
        """
        self._directory = directory
        self._names = {} if spec is None else FAMILIES[spec.architecture].tensor_names
        tensors = open_tensors(directory, newer)
        drafts = {name for name in tensors if name.startswith(_MTP)}
        self.num_drafts = len(drafts)  # tensors of the layer that predicts one token further
        for name in {*tensors} - drafts if is_mtp else drafts:
            del tensors[name]
        self._tensors = dict[str, Stored](tensors) if spec is None else split_tensors(tensors, spec, self.place)
        found = (prefix for prefix in _TEXT_PARTS if f"{prefix}embed_tokens.weight" in tensors)
        self._prefix = _MTP if is_mtp else next(found, "model.")

    def check(self, name: str, shape: Sequence[int]) -> None:
        name = self._find_name(name)
        if name not in self._tensors:
            raise ConfigError(f"{self._directory} has no tensor '{name}'; download the model again.")
        _check_shape(self._tensors[name].shape, shape, f"{self._directory}: '{name}'")

    def fill(self, name: str, target: Tensor) -> None:
        target.copy_(self.read(name, _WIDE_TYPES).view(target.shape))

    @property
    def place(self) -> str:
        """The directory, for messages."""
        return str(self._directory)

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""
        return self._find_name(name) in self._tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape, None if there is none."""
        tensor = self._tensors.get(self._find_name(name))
        return None if tensor is None else tensor.shape

    def read(self, name: str, types: Sequence[torch.dtype], entry: int | None = None) -> Tensor:
        """Return a tensor as it is stored, in one of these types, or one entry of its first dimension.

        Raises:
            ConfigError: it is of another type, or cannot be read.
        """
        name = self._find_name(name)
        try:
            values = self._tensors[name].read(entry)
        except Exception as error:  # the library's error type is not public
            raise ConfigError(f"{self._directory}: '{name}' cannot be read ({one_line(error)}).") from error
        if values.dtype not in types:
            raise ConfigError(f"{self._directory}: '{name}' has type {values.dtype}, which is not supported.")
        return values

    def read_quantized(self, names: Sequence[str], order: Sequence[Tensor] | None = None) -> None:
        """Fill all."""

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Return all tensors by their names, as they are stored."""
        for name, tensor in self._tensors.items():
            yield name, tensor.read()

    def _find_name(self, name: str) -> str:
        if not name.startswith("model."):
            own = f"language_model.{name}"
            return own if own in self._tensors else name
        name = name.removeprefix("model.")
        found = _PLACED_NAME.fullmatch(name)
        if found is not None and found[2] in self._names:
            name = f"{found[1] or ''}{self._names[found[2]]}{found[3]}"
        return self._prefix + name


class DummyCheckpoint:
    """Random weights, equal for equal seeds and devices."""

    norm_shift = 0.0
    keeps_groups = True
    matrices = None

    stored_rows: GgufCheckpoint | None = None

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Find a tensor of every name and shape."""

    def fill(self, name: str, target: Tensor) -> None:
        if name.endswith("norm.weight"):
            target.fill_(1)
        elif target.device.type == self._device.type and (target.device.index or 0) == (self._device.index or 0):
            target.normal_(std=0.02, generator=self.generator)
        else:  # which draws faster than the host
            for rows in target.split(_DRAWN_ROWS):
                drawn = torch.empty_like(rows, device=self._device)
                rows.copy_(drawn.normal_(std=0.02, generator=self.generator))

    def read_quantized(self, names: Sequence[str], order: Sequence[Tensor] | None = None) -> None:
        """Fill all."""


def _check_shape(found: Sequence[int], wanted: Sequence[int], place: str) -> None:
    if tuple(found) != tuple(wanted):
        raise ConfigError(
            f"{place} has shape {tuple(found)}, but the model's description asks for {tuple(wanted)};"
            " the files do not belong together."
        )
