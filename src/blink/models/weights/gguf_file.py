# SPDX-License-Identifier: Apache-2.0
"""Read the tensors of GGUF files, dequantized or as they are stored. Needs no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from mmap import MADV_WILLNEED, mmap
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.formats.schemes import GGUF_ON_GPU, GGUF_UNIT, PLANAR_BLOCK_BYTES
from blink.models.weights.gguf_header import HeaderReader, TensorInfo, map_gguf
from blink.region.native import lib

_PLAIN_KINDS = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
_MAX_ALIGNMENT = 1 << 20
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
KEEPING_GPU = (8, 0)  # compute capability from which on a GPU multiplies bfloat16


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies, which is within its file. `shape` is in PyTorch's order (rows first)."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int
    part: int = 0  # which file of a model that is split

    def can_stay_quantized(self, *, on_gpu: bool) -> bool:
        """Tell whether a GPU or the CPU has kernels that multiply with a matrix of this type as it is stored."""
        has_kernels = self.kind in GGUF_ON_GPU if on_gpu else bool(lib.blink_gguf_block_bytes(self.kind))
        return len(self.shape) > 1 and has_kernels

    @property
    def gpu_bytes(self) -> int:
        """Bytes of a matrix that stays quantised on a GPU, where a row has a whole number of units of 64 columns."""
        values, num_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        blocks = -(-self.shape[-1] // GGUF_UNIT) * GGUF_UNIT // values
        return math.prod(self.shape[:-1]) * blocks * PLANAR_BLOCK_BYTES.get(self.kind, num_bytes)


class GgufFile:
    """An open GGUF file, or all files of a split model, whose first is given: `metadata` by key, `tensors` by name.

    `metadata` has nothing of the tokenizer.

    Raises:
        ConfigError: a file is no GGUF file of version 2 or 3, is cut off or missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts: list[mmap] = []
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        for part in list_parts(path):
            metadata, tensors = self._open(part)
            self.metadata = self.metadata or metadata
            if twice := tensors.keys() & self.tensors.keys():
                raise ConfigError(f"{part}: tensor {show(min(twice))} is in another part too; download it again.")
            self.tensors |= tensors

    def _open(self, path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Map one file, and read its metadata and where its tensors lie."""
        data, part = map_gguf(path), len(self._parts)
        self._parts.append(data)
        reader = HeaderReader(data, path)
        metadata, infos = reader.read_pairs(with_tokenizer=False), reader.read_tensor_infos()
        default = gguf.GGUF_DEFAULT_ALIGNMENT
        alignment = Fields(metadata, str(path)).integer("general.alignment", default, high=_MAX_ALIGNMENT)
        start = -(-reader.offset // alignment) * alignment
        tensors = {name: replace(_place(path, name, info, start), part=part) for name, info in infos.items()}
        end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=0)
        if end > len(data):
            raise ConfigError(f"{path} is cut off: {len(data)} of at least {end} bytes; download it again.")
        return metadata, tensors

    def prefetch(self) -> None:
        """Let the kernel read the files from the disk while other things are prepared."""
        for part in self._parts:
            part.madvise(MADV_WILLNEED)

    def read_tensor(self, name: str, index: int | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a tensor, or only entry `index` of its first dimension, as float32, dequantised where needed."""
        tensor = self.tensors[name]
        rows = self.read_rows(name, index)
        shape = tensor.shape if index is None else tensor.shape[1:]
        try:
            values = gguf.quants.dequantize(_as_stored(rows, tensor.kind), tensor.kind)
        except NotImplementedError:
            raise ConfigError(
                f"{self.path}: tensor '{name}' has type {tensor.kind.name}, which cannot be dequantised;"
                " use a Q8_0, F16 or BF16 file."
            ) from None
        values = values.reshape(shape).astype(np.float32, copy=False)
        return values if values.flags.writeable else values.copy()

    def read_rows(self, name: str, index: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of a tensor's rows as they are stored, or only of entry `index`; read-only."""
        tensor = self.tensors[name]
        data = self._parts[tensor.part]
        rows = np.frombuffer(data, np.uint8, tensor.num_bytes, tensor.offset).reshape(*tensor.shape[:-1], -1)
        return rows if index is None else rows[index]


def list_parts(path: Path) -> list[Path]:
    """Return all files of a GGUF model, by the name of its first: one, unless the name says that it is split.

    Raises:
        ConfigError: another part than the first is given, or one is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    first = path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")
    if path != first:
        raise ConfigError(f"{path} is a part of a split model; give its first, {first.name}.")
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]
    if missing := [part.name for part in paths if not part.is_file()]:
        raise ConfigError(f"{path} is split, and {missing[0]} is not beside it; download the model again.")
    return paths


def _place(path: Path, name: str, info: TensorInfo, start: int) -> GgufTensor:
    """Add to a tensor's offset where the tensors' part starts, and find its size."""
    where = f"{path}: tensor {show(name)}"
    try:
        kind = gguf.GGMLQuantizationType(info.kind)
    except ValueError as error:
        raise ConfigError(f"{where} has an unknown type ({info.kind}); use a Q8_0, F16 or BF16 file.") from error
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if 0 in info.shape or info.shape[-1] % block:
        raise ConfigError(f"{where} cannot have the shape {info.shape}; download or convert the model again.")
    return GgufTensor(info.shape, kind, start + info.offset, math.prod(info.shape) // block * block_bytes)


def _as_stored(rows: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    return rows.view(_PLAIN_KINDS[kind]) if kind in _PLAIN_KINDS else rows
