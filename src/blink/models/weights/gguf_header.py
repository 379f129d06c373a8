# SPDX-License-Identifier: Apache-2.0
"""Read the header of a GGUF file (ggml-org/ggml, docs/gguf.md): key-value pairs, then where each tensor lies.

The gguf package's reader makes a numpy array of every string of the vocabulary; this one takes a tenth of its time,
and frontends need no package for it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blink.errors import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
# What a damaged header raises in here.
HEADER_ERRORS = (struct.error, ValueError, KeyError, OverflowError)


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return all key-value pairs of a GGUF file (version 2 or 3, little-endian).

    Raises:
        ConfigError: the file is no GGUF file or is cut short.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return HeaderReader(data).read_pairs()
        except HEADER_ERRORS as error:
            raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ConfigError:
    """Return the error for a file whose header cannot be read."""
    return ConfigError(f"{path} is not a readable GGUF file ({error}); download it again.")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says of one tensor. `shape` is in PyTorch's order (rows first)."""

    name: str
    shape: tuple[int, ...]
    kind: int  # a gguf.GGMLQuantizationType
    offset: int  # from the start of the tensors' part


class HeaderReader:
    """Reads a header from front to back; raises one of HEADER_ERRORS where it is damaged."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 0
        self._num_tensors = 0

    @property
    def offset(self) -> int:
        """How many bytes have been read."""
        return self._offset

    def read_pairs(self) -> dict[str, Any]:
        """Return all key-value pairs."""
        if self._data[:4] != b"GGUF":
            raise ValueError("wrong magic")
        self._offset = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported")
        self._num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            pairs[key] = self._value(self._scalar("I"))
        return pairs

    def read_tensor_infos(self) -> list[TensorInfo]:
        """Return what stands behind the pairs."""
        return [self._tensor_info() for _ in range(self._num_tensors)]

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return TensorInfo(name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = list(layout.unpack_from(self._data, self._offset))
        self._offset += layout.size
        return values

    def _strings(self, count: int) -> list[str]:
        # A vocabulary holds 10^5 strings: this loop is the time to load a tokenizer.
        data, offset, unpack = self._data, self._offset, struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(data, offset)[0]
            strings.append(data[start:offset].decode("utf-8", "replace"))
        self._offset = offset
        return strings

    def _string(self) -> str:
        return self._strings(1)[0]

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        value = layout.unpack_from(self._data, self._offset)[0]
        self._offset += layout.size
        return value
