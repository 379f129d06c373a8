# SPDX-License-Identifier: Apache-2.0
"""The shared structs as numpy dtypes, built from the native library's own table; refuses a mismatch at import."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

import numpy as np

from blink.errors import LayoutMismatchError
from blink.region.native import lib

_table: dict[str, Any] = json.loads(lib.blink_layout_text())
DIGEST: int = lib.blink_layout_digest()
CONSTANTS: dict[str, int] = _table["constants"]


def struct_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a native struct, nested structs included."""
    fields = _table[name]["fields"]
    return np.dtype(
        {
            "names": [field for field, _, _ in fields],
            "formats": [_NESTED[field] if code == "struct" else code for field, code, _ in fields],
            "offsets": [offset for _, _, offset in fields],
            "itemsize": _table[name]["bytes"],
        }
    )


_NESTED: dict[str, np.dtype[Any]] = {}
GEOMETRY = _NESTED["geometry"] = struct_dtype("Geometry")
STATISTICS = _NESTED["statistics"] = struct_dtype("Statistics")
HEADER = struct_dtype("Header")
CONTROL = struct_dtype("Control")
TRACE_ENTRY = struct_dtype("TraceEntry")
FRONTEND_WORDS = struct_dtype("FrontendWords")
SCHEDULER_WORDS = struct_dtype("SchedulerWords")
SQE = struct_dtype("Sqe")
CQE = struct_dtype("Cqe")
SLOT_PARAMS = struct_dtype("SlotParams")
BATCH_HEADER = struct_dtype("BatchHeader")
STEP_OUTPUT = struct_dtype("StepOutput")
DECISION_LOG_ENTRY = struct_dtype("DecisionLogEntry")
SEQUENCE = struct_dtype("Sequence")


def field_offset(dtype: np.dtype[Any], name: str) -> int:
    """Return where a field of a struct starts, in bytes."""
    assert dtype.fields is not None
    return dtype.fields[name][1]


# A CQE as frontends read it: the tag split into its bytes.
_PLAIN = ("sequence", "time_ns", "token", "logprob", "index")
_TAG_BYTES = {"kind": 1, "finish_reason": 2, "rank": 3}
COMPLETION = np.dtype(
    {
        "names": [*_PLAIN, *_TAG_BYTES],
        "formats": ["u8", "u8", "i4", "f4", "u4", "u1", "u1", "u1"],
        "offsets": [
            *(field_offset(CQE, name) for name in _PLAIN),
            *(field_offset(CQE, "tag") + byte for byte in _TAG_BYTES.values()),
        ],
        "itemsize": CQE.itemsize,
    }
)


class Opcode(IntEnum):
    SUBMIT = 1
    CANCEL = 2


class CqeKind(IntEnum):
    ADMITTED = 1
    TOKEN = 2
    TOP_LOGPROB = 3
    FINISHED = 4
    REJECTED = 5


class FinishReason(IntEnum):
    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class EngineState(IntEnum):
    BOOTING = 0
    READY = 1
    DRAINING = 2
    DRAINED = 3
    STOPPED = 4
    FAILED = 5


class RejectCode(IntEnum):
    NONE = 0
    OPCODE = 1
    TAG = 2
    TAG_BUSY = 3
    UNKNOWN_SEQUENCE = 4
    PROMPT_LENGTH = 5
    PROMPT_RANGE = 6
    PROMPT_TOKEN = 7
    STOP_TOKENS = 8
    LOGIT_BIAS = 9
    HASHES = 10
    SAMPLING_VALUE = 11
    MAX_TOKENS = 12
    SERVICE_CLASS = 13
    DRAINING = 14


class ErrorCode(IntEnum):
    NONE = 0
    STEP_FAILED = 1
    SAMPLED_TOKEN_RANGE = 2
    FREE_LIST_CORRUPT = 3
    REF_COUNT_CORRUPT = 4
    HASH_TABLE_CORRUPT = 5
    LAUNCH_FAILED = 6


class StepResult(IntEnum):
    """What one pass of the scheduler did."""

    IDLE = 0
    BUSY = 1
    LAUNCHED = 2
    STOPPED = 3
    FAILED = 4


def _native_name(name: str) -> str:
    return "k" + "".join(word.capitalize() for word in name.split("_"))


def _check(enum: type[IntEnum]) -> None:
    here = {_native_name(member.name): member.value for member in enum}
    if here != _table[enum.__name__]:
        raise LayoutMismatchError(
            f"{enum.__name__} differs from the native library: {here} and {_table[enum.__name__]}"
        )


for _enum in (Opcode, CqeKind, FinishReason, EngineState, RejectCode, ErrorCode):
    _check(_enum)
