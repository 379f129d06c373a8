# SPDX-License-Identifier: Apache-2.0
"""Read the key-value section of a GGUF file, and nothing of its tensors."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from blink.errors import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return all key-value pairs of a GGUF file (version 2 or 3, little-endian).

    Raises:
        ConfigError: the file is no GGUF file or is cut short.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).read_pairs()
        except (struct.error, ValueError, KeyError, OverflowError) as error:
            raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 0

    def read_pairs(self) -> dict[str, Any]:
        if self._data[:4] != b"GGUF":
            raise ValueError("wrong magic")
        self._offset = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        self._scalar("Q")  # the number of tensors
        num_pairs = self._scalar("Q")
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            pairs[key] = self._value(self._scalar("I"))
        return pairs

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
