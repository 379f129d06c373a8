# SPDX-License-Identifier: Apache-2.0
"""Handles of tensors in another process's memory of a GPU, as ipc_handles.py reads them: what they may reach."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch

from blink.errors import BadRequestError
from blink.region.tensor_stream import TensorEntry

_TYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_COUNTER: Final = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")  # shared memory of PyTorch, with counters of readers
_NUM_COUNTERS: Final = 10000  # in one


def find_handle(entry: TensorEntry, handles: Mapping[str, Any], uuid: str) -> dict[str, Any]:
    """Return a tensor's handle for the GPU of a UUID. handles: by UUIDs, which may begin with GPU-.

    Raises:
        BadRequestError: there is none, or it is another tensor's.
    """
    found = next((one for gpu, one in handles.items() if _plain(gpu) == _plain(uuid)), None)
    if found is None:
        raise BadRequestError(
            f"'{entry.name}' does not lie on the engine's GPU, {uuid}: send a stream, or broadcast it."
        )
    check_handle(entry, found)
    return found


def check_handle(entry: TensorEntry, handle: Mapping[str, Any]) -> None:
    """Compare a handle with the tensor that it is to be, before anything is opened.

    Raises:
        BadRequestError: it is another tensor's, or reaches beyond what is shared.
    """
    shape, stride, offset = tuple(handle["shape"]), tuple(handle["stride"]), handle["offset"]
    if shape != entry.shape or _TYPES.get(handle["dtype"]) != entry.dtype or len(stride) != len(shape):
        raise BadRequestError(f"'{entry.name}' is {[*shape]} of {handle['dtype']} by its handle: names do not agree.")
    reach = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    itemsize = getattr(torch, handle["dtype"]).itemsize
    is_inside = min(0, offset, handle["offset_bytes"], *stride) == 0 and reach * itemsize <= handle["num_bytes"]
    counts = _COUNTER.fullmatch(bytes.fromhex(handle["counter"])) and 0 <= handle["counter_offset"] < _NUM_COUNTERS
    if not is_inside or not counts or 0 in shape:
        raise BadRequestError(f"'{entry.name}' has a handle that reaches beyond what it shares.")


def _plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()
