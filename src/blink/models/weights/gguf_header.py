# SPDX-License-Identifier: Apache-2.0
"""Read the header of a GGUF file (ggml-org/ggml, docs/gguf.md): key-value pairs, then where each tensor lies.

The gguf package's reader makes a numpy array of every string of the vocabulary; this one takes a tenth of its time,
and frontends need no package for it. The file may come from a stranger: each count and length is held against what is
left of the file before anything is made of it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blink.errors import ConfigError
from blink.fields import show

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TOKENIZER = "tokenizer."  # how the keys of the vocabulary begin, which is nearly all of a header
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4  # ggml's
_MAX_DEPTH = 4  # of arrays of arrays
# The vocabularies of today take 20 MiB at most. What is read may take ten times its size in Python.
_MAX_HEADER_BYTES = 64 << 20
# The fewest bytes that each of these takes: they bound the counts.
_PAIR_BYTES, _TENSOR_BYTES, _STRING_BYTES, _ARRAY_BYTES = 13, 24, 8, 12


def map_gguf(path: Path) -> mmap.mmap:
    """Map a file into memory.

    Raises:
        ConfigError: it is empty or cannot be read.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a readable GGUF file ({error}); download it again.") from error


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return all key-value pairs of a GGUF file (version 2 or 3, little-endian).

    Raises:
        ConfigError: the file is no GGUF file or is cut short.
    """
    with map_gguf(path) as data:
        return HeaderReader(data, path).read_pairs()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says of one tensor. `shape` is in PyTorch's order (rows first)."""

    shape: tuple[int, ...]
    kind: int  # a gguf.GGMLQuantizationType
    offset: int  # from the start of the tensors' part


class HeaderReader:
    """Reads a header from front to back; raises a ConfigError where it is damaged."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._end = min(len(data), _MAX_HEADER_BYTES)
        self._offset = 0
        self._num_tensors = 0
        self._keeps_strings = True

    @property
    def offset(self) -> int:
        """How many bytes have been read."""
        return self._offset

    def damaged(self, reason: str) -> ConfigError:
        """Return the error for a file whose header cannot be read."""
        return ConfigError(f"{self._path} is not a readable GGUF file ({reason}); download it again.")

    def read_pairs(self, *, with_tokenizer: bool = True) -> dict[str, Any]:
        """Return all key-value pairs, or those that are no part of the tokenizer, in a third of the time."""
        if self._data[:4] != b"GGUF":
            raise self.damaged("wrong magic")
        self._offset = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise self.damaged(f"version {version} is not supported")
        self._num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        self._need(num_pairs, _PAIR_BYTES)
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            if key in pairs:
                raise self.damaged(f"the key {show(key)} is there twice")
            self._keeps_strings = with_tokenizer or not key.startswith(_TOKENIZER)
            pairs[key] = self._value(self._scalar("I"))
        self._keeps_strings = True
        return pairs if with_tokenizer else {k: v for k, v in pairs.items() if not k.startswith(_TOKENIZER)}

    def read_tensor_infos(self) -> dict[str, TensorInfo]:
        """Return what stands behind the pairs, by the tensors' names."""
        self._need(self._num_tensors, _TENSOR_BYTES)
        infos: dict[str, TensorInfo] = {}
        for _ in range(self._num_tensors):
            name = self._string()
            if name in infos:
                raise self.damaged(f"the tensor {show(name)} is there twice")
            infos[name] = self._tensor_info(name)
        return infos

    def _tensor_info(self, name: str) -> TensorInfo:
        num_dims = self._scalar("I")
        if not 1 <= num_dims <= _MAX_DIMENSIONS:
            raise self.damaged(f"the tensor {show(name)} has {num_dims} dimensions")
        dims = [self._scalar("Q") for _ in range(num_dims)]
        return TensorInfo(tuple(reversed(dims)), self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(_MAX_DEPTH)
        return self._scalar(self._code(kind))

    def _array(self, depth: int) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._strings(count) if self._keeps_strings else self._skip_strings(count)
        if kind == _ARRAY:
            if not depth:
                raise self.damaged("arrays are nested too deeply")
            self._need(count, _ARRAY_BYTES)
            return [self._array(depth - 1) for _ in range(count)]
        code = self._code(kind)
        self._need(count, struct.calcsize(code))
        layout = struct.Struct(f"<{count}{code}")
        values = list(layout.unpack_from(self._data, self._offset))
        self._offset += layout.size
        return values

    def _strings(self, count: int) -> list[str]:
        # A vocabulary holds 10^5 strings: this loop is the time to load a tokenizer.
        self._need(count, _STRING_BYTES)
        data, offset, end, unpack = self._data, self._offset, self._end, struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = offset + _STRING_BYTES
            if start > end:
                raise self._cut_off()
            offset = start + unpack(data, start - _STRING_BYTES)[0]
            if offset > end:
                raise self._cut_off()
            strings.append(data[start:offset].decode("utf-8", "replace"))
        self._offset = offset
        return strings

    def _skip_strings(self, count: int) -> list[str]:
        """Go behind strings, and return none."""
        self._need(count, _STRING_BYTES)
        data, offset, unpack = self._data, self._offset, struct.Struct("<Q").unpack_from
        last = self._end - _STRING_BYTES
        for _ in range(count):
            if offset > last:
                raise self._cut_off()
            offset += _STRING_BYTES + unpack(data, offset)[0]
        if offset > self._end:
            raise self._cut_off()
        self._offset = offset
        return []

    def _string(self) -> str:
        return self._strings(1)[0]

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        self._need(1, layout.size)
        value = layout.unpack_from(self._data, self._offset)[0]
        self._offset += layout.size
        return value

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.damaged(f"there is no type {kind} of values")
        return _SCALARS[kind]

    def _need(self, count: int, size: int) -> None:
        """Refuse a count of things of at least `size` bytes for which the file, or a header, has no room."""
        if count * size > self._end - self._offset:
            raise self._cut_off()

    def _cut_off(self) -> ConfigError:
        if self._end < len(self._data):
            return self.damaged(f"its header is larger than {self._end} bytes, or damaged")
        return self.damaged("its header is damaged or cut off")
