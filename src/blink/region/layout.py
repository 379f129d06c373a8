# SPDX-License-Identifier: Apache-2.0
"""The shared structs as numpy dtypes and the shared codes as enumerations, built from the native library's table."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import EnumMeta, IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from blink.region.constants import CONSTANTS as CONSTANTS
from blink.region.constants import TABLE as TABLE
from blink.region.constants import split_words
from blink.region.native import lib

_E = TypeVar("_E")
Fields = dict[str, tuple[np.dtype[Any], int]]

DIGEST: int = lib.blink_layout_digest()


@functools.cache
def struct_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a native struct, nested structs included."""
    fields: dict[str, Any] = dict(TABLE["structs"][name])
    size = fields.pop("")
    return np.dtype(
        {
            "names": list(fields),
            "formats": [_field_type(code) for code, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": size,
        }
    )


def _field_type(code: str) -> Any:
    """Return the numpy type of a code such as "u4", "(8,)i4" or "(128,)GraphSize"."""
    count, element = re.fullmatch(r"(?:\((\d+),\))?(\w+)", code).groups()  # type: ignore[union-attr]
    base = struct_dtype(element) if element in TABLE["structs"] else np.dtype(element)
    return (base, (int(count),)) if count else base


def new_struct(name: str, **values: int) -> npt.NDArray[np.void]:
    """Return a native struct with these values in its fields and zeros in the others."""
    made = np.zeros((), struct_dtype(name))
    for field, value in values.items():
        made[field] = value
    return made


GEOMETRY = struct_dtype("Geometry")
STATISTICS = struct_dtype("Statistics")
HEADER = struct_dtype("Header")
CONTROL = struct_dtype("Control")
TRACE_ENTRY = struct_dtype("TraceEntry")
FRONTEND_WORDS = struct_dtype("FrontendWords")
SCHEDULER_WORDS = struct_dtype("SchedulerWords")
SAMPLING = struct_dtype("Sampling")
SQE = struct_dtype("Sqe")
CQE = struct_dtype("Cqe")
VECTOR_CQE = struct_dtype("VectorCqe")  # as which a completion of kind VECTOR is read
QUEUE_PAIR_LAYOUT = struct_dtype("QueuePairLayout")
SLOT_PARAMS = struct_dtype("SlotParams")
AUTOMATON_HEADER = struct_dtype("AutomatonHeader")
AUTOMATON_PLACE = struct_dtype("AutomatonPlace")
BATCH_HEADER = struct_dtype("BatchHeader")
STEP_OUTPUT = struct_dtype("StepOutput")
STEP_BUFFERS = struct_dtype("StepBuffers")
ROW = struct_dtype("Row")
DECISION_LOG_ENTRY = struct_dtype("DecisionLogEntry")
SEQUENCE = struct_dtype("Sequence")
STATE = struct_dtype("State")
GRAPH_COST = struct_dtype("GraphCost")
STEP_GRAPHS = struct_dtype("StepGraphs")
DEVICE_PROGRAM = struct_dtype("DeviceProgram")
FOLLOWER_PROGRAM = struct_dtype("FollowerProgram")


def own_fields(dtype: np.dtype[Any]) -> Fields:
    """Return type and offset of each field of a struct; one that is a struct stays whole."""
    return {name: (field, offset) for name, (field, offset, *_) in (dtype.fields or {}).items()}


def flat_fields(dtype: np.dtype[Any]) -> Fields:
    """Return type and offset of each field of a struct, those of nested structs under their own names."""
    found: Fields = {}
    for name, (field, offset) in own_fields(dtype).items():
        inner = {key: (kind, offset + start) for key, (kind, start) in flat_fields(field).items()}
        found |= inner or {name: (field, offset)}
    return found


def field_offset(dtype: np.dtype[Any], name: str) -> int:
    """Return where a field of a struct starts, in bytes."""
    assert dtype.fields is not None
    return dtype.fields[name][1]


class StructPacker:
    """Make the bytes of one struct from the values of its fields, without numpy's cost for single values.

    list_fields: whether these are the flat ones or its own.
    """

    def __init__(self, dtype: np.dtype[Any], list_fields: Callable[[np.dtype[Any]], Fields] = flat_fields) -> None:
        fields = list_fields(dtype)
        self._names = [*fields]
        self._struct = _native_struct(dtype, fields)

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """Return the bytes; an array's or a struct's value is its own bytes, or the first of them."""
        return self._struct.pack(*map(values.__getitem__, self._names))


class StructReader:
    """Take some flat fields, named in the order of their places, out of structs that follow each other."""

    def __init__(self, dtype: np.dtype[Any], names: Sequence[str]) -> None:
        fields = flat_fields(dtype)
        self._struct = _native_struct(dtype, {name: fields[name] for name in names})

    def read(self, structs: npt.NDArray[np.void]) -> Iterator[tuple[Any, ...]]:
        """Return the values of each struct."""
        return self._struct.iter_unpack(structs.data)


def _native_struct(dtype: np.dtype[Any], fields: Fields) -> struct.Struct:
    """Return what packs these fields; the other bytes are padding."""
    parts, end = ["<"], 0
    for kind, start in fields.values():
        parts.append(f"{start - end}x")
        parts.append(_PACKED.get(kind.str) or f"{kind.itemsize}s")
        end = start + kind.itemsize
    return struct.Struct("".join(parts) + f"{dtype.itemsize - end}x")


_PACKED = {"<u4": "I", "<i4": "i", "<u8": "Q", "<i8": "q", "<f4": "f", "|u1": "B"}


def _completion() -> np.dtype[Any]:
    fields = flat_fields(CQE)
    _, tag = fields.pop("tag")
    fields |= {name: (kind, tag + start) for name, (kind, start) in flat_fields(struct_dtype("CqeTag")).items()}
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": CQE.itemsize})


COMPLETION = _completion()  # a CQE as frontends read it: the tag split into its bytes


class _NativeMeta(EnumMeta):
    """Give an enumeration the members that the native library's table has: of its name, or the words of `struct`."""

    @classmethod
    def __prepare__(metacls, cls: str, bases: tuple[type, ...], struct: str = "", **options: Any) -> Any:
        namespace = super().__prepare__(cls, bases, **options)
        members = TABLE["enums"].get(cls, {})
        if struct:
            members = {f"k_{name}": start // 4 for name, (_, start) in flat_fields(struct_dtype(struct)).items()}
        for name, value in members.items():
            namespace[(name[2:] if struct else split_words(name)).upper()] = value
        return namespace

    if TYPE_CHECKING:  # the members; one that does not exist raises AttributeError

        def __getattr__(cls: type[_E], name: str) -> _E: ...


class NativeEnum(IntEnum, metaclass=_NativeMeta):
    """An enumeration of csrc. A subclass of that name has its members: kTagBusy is TAG_BUSY.

    With `struct`, the members are that struct's 32-bit words by the names of its fields, nested structs included.
    """

    def __init_subclass__(cls, struct: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)


class Opcode(NativeEnum):
    """What an SQE asks for."""


class PauseMode(NativeEnum):
    """What becomes of sequences while nothing is launched."""


class Drop(NativeEnum):
    """What a pause takes away."""


class Absent(NativeEnum):
    """What an engine's model lacks: bits of a word."""


class CqeKind(NativeEnum):
    """What a completion tells."""


class FinishReason(NativeEnum):
    """Why a sequence ended; NONE while it goes on."""


class Task(NativeEnum):
    """What the engine makes of prompts."""


class ServiceClass(NativeEnum):
    """Who may be preempted by whom."""


class EngineState(NativeEnum):
    """What the scheduler does as a whole."""


class RejectCode(NativeEnum):
    """Why an SQE was refused."""


class ErrorCode(NativeEnum):
    """Why the scheduler stopped."""


class KvEventKind(NativeEnum):
    """What became of the prefix cache."""


class StepResult(NativeEnum):
    """What one pass of the scheduler did."""


class StepClass(NativeEnum):
    """Whose sequences a step takes."""


class SequenceStatus(NativeEnum):
    """Where a sequence stands in the scheduler."""


class RowKind(NativeEnum):
    """What a row of a step is."""


class StepKind(NativeEnum):
    """Which of the state's StepBuffers a launch has."""

    def array(self, name: str) -> str:
        """Return what the state calls an array of these buffers."""
        return f"{self.name.lower()}.{name}"


def place_name(place: int) -> str:
    """Return the file and line of csrc that the control block's error_place means."""
    found = np.uint32(place).reshape(1).view(struct_dtype("Place"))[0]
    files = {index: file for file, index in TABLE["files"].items()}
    return f"{files[int(found['file'])]}:{found['line']}"
