# SPDX-License-Identifier: Apache-2.0
"""Read GGUF files (ggml-org/ggml, docs/gguf.md): metadata and dequantised tensors. Needs no torch.

The gguf package's own reader makes a numpy array of every token of the vocabulary; this one takes a tenth of its time.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from blink.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


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
            self.metadata, self.tensors = _Cursor(self._data).read_file()
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise ConfigError(f"{path} is not a readable GGUF file ({error}); download it again.") from error
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


class _Cursor:
    """Reads the header of a GGUF file from front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 0

    def read_file(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._data[:4] != _MAGIC:
            raise ValueError("wrong magic")
        self._offset = 4
        version, num_tensors, num_keys = self._unpack("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._read_string()
            metadata[key] = self._read_value(self._unpack("I")[0])
        infos = [self._read_tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        start = -(-self._offset // alignment) * alignment
        return metadata, {name: _place_tensor(shape, kind, start + offset) for name, shape, kind, offset in infos}

    def _unpack(self, formats: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + formats)
        values = layout.unpack_from(self._data, self._offset)
        self._offset += layout.size
        return values

    def _read_bytes(self) -> bytes:
        (length,) = self._unpack("Q")
        self._offset += length
        return self._data[self._offset - length : self._offset]

    def _read_string(self) -> str:
        return self._read_bytes().decode("utf-8")

    def _read_value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._read_string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        item, length = self._unpack("IQ")
        if item in _SCALARS:
            return list(self._unpack(f"{length}{_SCALARS[item]}"))
        return [self._read_value(item) for _ in range(length)]

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name = self._read_string()
        (num_dims,) = self._unpack("I")
        dims = self._unpack(f"{num_dims}Q")
        kind, offset = self._unpack("IQ")
        return name, tuple(reversed(dims)), gguf.GGMLQuantizationType(kind), offset


def _place_tensor(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, offset: int) -> GgufTensor:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_elements = int(np.prod(shape, dtype=np.int64))
    return GgufTensor(shape, kind, offset, num_elements // block * block_bytes)
