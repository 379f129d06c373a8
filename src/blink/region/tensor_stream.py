# SPDX-License-Identifier: Apache-2.0
"""A stream of tensors as safetensors files have them: what it holds, told before the first value. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from math import prod
from typing import Any, Final

from blink.errors import BadRequestError
from blink.fields import show

# Bytes of a number, by what safetensors calls its type.
DTYPE_BYTES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MAX_HEADER = 32 << 20
_MAX_TENSORS = 1 << 18
_MAX_NAME = 512
_MAX_DIMENSIONS = 8
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor that is to come: its name, its type as safetensors calls it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def make_entry(name: Any, dtype: Any, shape: Any) -> TensorEntry:
    """Return a tensor's entry of what a client says of it.

    Raises:
        BadRequestError: it is malformed.
    """
    if not (isinstance(name, str) and 0 < len(name) <= _MAX_NAME):
        raise BadRequestError(f"A tensor's name has 1 to {_MAX_NAME} characters, got {show(name)}.")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BadRequestError(f"'{name}' has type {show(dtype)}: types are {', '.join(DTYPE_BYTES)}.")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise BadRequestError(f"'{name}' has shape {show(shape)}, which is none.")
    return TensorEntry(name, dtype, tuple(shape))


def check_distinct(entries: Iterable[TensorEntry]) -> None:
    """Refuse tensors of which two have one name, or too many.

    Raises:
        BadRequestError: two have, or they are too many.
    """
    names = [entry.name for entry in entries]
    if not names or len(names) > _MAX_TENSORS:
        raise BadRequestError(f"An update holds 1 to {_MAX_TENSORS} tensors, got {len(names)}.")
    if len({*names}) != len(names):
        raise BadRequestError("An update holds each tensor once.")


def read_header(stream: BufferedIOBase) -> list[TensorEntry]:
    """Read the head of a stream and return the tensors that follow, in their order; nothing lies between them.

    Raises:
        BadRequestError: it is no safetensors stream.
    """
    size = int.from_bytes(read_whole(stream, 8), "little")
    if not 2 <= size <= _MAX_HEADER:
        raise BadRequestError(f"The stream is not safetensors, or its header is larger than {_MAX_HEADER} bytes.")
    try:
        header = json.loads(read_whole(stream, size))
    except (ValueError, RecursionError) as error:
        raise BadRequestError("The stream's header is no JSON, so it is not safetensors.") from error
    if not isinstance(header, dict):
        raise BadRequestError("The stream's header is no object, so it is not safetensors.")
    header.pop("__metadata__", None)
    placed = sorted((_read_place(name, fields) for name, fields in header.items()), key=lambda one: one[0])
    entries = [entry for _, entry in placed]
    check_distinct(entries)
    expected = 0
    for (begin, end), entry in placed:
        if begin != expected or end - begin != entry.num_bytes:
            raise BadRequestError(f"'{entry.name}' does not lie where its header says, or has another size.")
        expected = end
    return entries


def write_header(entries: Iterable[TensorEntry]) -> bytes:
    """Return the head of a stream of tensors in this order, as long as a multiple of 8 bytes."""
    fields, begin = dict[str, Any](), 0
    for entry in entries:
        end = begin + entry.num_bytes
        fields[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_chunks(stream: BufferedIOBase, size: int) -> Iterator[bytes]:
    """Yield so many bytes of a stream in pieces.

    Raises:
        BadRequestError: it ends before.
    """
    while size > 0:
        piece = read_whole(stream, min(size, _CHUNK))
        size -= len(piece)
        yield piece


def read_whole(stream: BufferedIOBase, size: int) -> bytes:
    """Return so many bytes of a stream.

    Raises:
        BadRequestError: it ends before, or stands still for too long.
    """
    try:
        data = stream.read(size)
    except OSError as error:
        raise BadRequestError("The stream of tensors stands still or is broken.") from error
    if len(data) < size:
        raise BadRequestError("The stream of tensors ended early.")
    return data


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40


def _read_place(name: str, fields: Any) -> tuple[tuple[int, int], TensorEntry]:
    """Return where a tensor's values begin and end behind the header, and its entry."""
    known = isinstance(fields, dict) and {"dtype", "shape", "data_offsets"} <= fields.keys()
    ends = fields["data_offsets"] if known else None
    if not (isinstance(ends, list) and len(ends) == 2 and all(map(_is_size, ends))):
        raise BadRequestError(f"{show(name)} has no type, shape and place in the stream's header.")
    return (ends[0], ends[1]), make_entry(name, fields["dtype"], fields["shape"])
