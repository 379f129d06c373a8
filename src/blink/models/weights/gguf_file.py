# SPDX-License-Identifier: Apache-2.0
"""Read the tensors of GGUF files, dequantised. Needs no torch."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from blink.errors import ConfigError
from blink.models.weights.gguf_header import HEADER_ERRORS, HeaderReader, TensorInfo, unreadable


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` is in PyTorch's order (rows first)."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name.

    Raises:
        ConfigError: the file is no GGUF file of version 2 or 3, or is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            reader = HeaderReader(self._data)
            self.metadata, infos = reader.read_pairs(), reader.read_tensor_infos()
            self.tensors = _place_tensors(self.metadata, infos, reader.offset)
        except (OSError, *HEADER_ERRORS) as error:
            raise unreadable(path, error) from error
        end = max((tensor.offset + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if end > len(self._data):
            raise ConfigError(f"{path} is cut off: {len(self._data)} of at least {end} bytes; download it again.")

    def read_tensor(self, name: str, index: int | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a tensor, or only entry `index` of its first dimension, as float32, dequantised where needed."""
        tensor = self.tensors[name]
        rows = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset).reshape(*tensor.shape[:-1], -1)
        shape = tensor.shape
        if index is not None:
            rows, shape = rows[index], shape[1:]
        try:
            values = gguf.quants.dequantize(_as_stored(rows, tensor.kind), tensor.kind)
        except NotImplementedError:
            raise ConfigError(
                f"{self.path}: tensor '{name}' has type {tensor.kind.name}, which cannot be dequantised;"
                " use a Q8_0, F16 or BF16 file."
            ) from None
        values = values.reshape(shape).astype(np.float32, copy=False)
        return values if values.flags.writeable else values.copy()


def _as_stored(rows: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    plain = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
    return rows.view(plain[kind]) if kind in plain else rows


def _place_tensors(metadata: dict[str, Any], infos: list[TensorInfo], header_bytes: int) -> dict[str, GgufTensor]:
    """Add to each tensor's offset where the tensors' part starts, and find its size."""
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    start = -(-header_bytes // alignment) * alignment
    return {info.name: _place_tensor(info, start) for info in infos}


def _place_tensor(info: TensorInfo, start: int) -> GgufTensor:
    kind = gguf.GGMLQuantizationType(info.kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_elements = int(np.prod(info.shape, dtype=np.int64))
    return GgufTensor(info.shape, kind, start + info.offset, num_elements // block * block_bytes)
