# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, and PyTorch's calls for processes are not public.
# pyright: reportAttributeAccessIssue=false
"""Tensors in another process's memory of this GPU, by handles of CUDA IPC as PyTorch makes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch

from blink.engine.weight_group import bytes_of
from blink.errors import BadRequestError
from blink.fields import one_line
from blink.region.tensor_stream import TensorEntry

_TYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_COUNTER: Final = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")  # shared memory of PyTorch, with counters of readers
_NUM_COUNTERS: Final = 10000  # in one


def find_handle(entry: TensorEntry, handles: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a tensor's handle for a GPU. handles: by the UUIDs of GPUs.

    Raises:
        BadRequestError: there is none, or it is another tensor's.
    """
    uuid = _plain(str(torch.cuda.get_device_properties(device).uuid))
    found = next((one for gpu, one in handles.items() if _plain(gpu) == uuid), None)
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


def read_shared(entry: TensorEntry, handle: Mapping[str, Any], device: torch.device) -> memoryview:
    """Return the bytes of a tensor by a handle that was checked.

    Raises:
        BadRequestError: it cannot be opened: the process has ended, or the handle is none.
    """
    from cuda.bindings import driver

    opened, counter, event = (bytes.fromhex(handle[name]) for name in ("handle", "counter", "event"))
    counts = counter, handle["counter_offset"], event, handle["awaits_event"]
    place = device.index or 0, opened, handle["num_bytes"], handle["offset_bytes"]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*place, *counts)
    except RuntimeError as error:
        raise BadRequestError(
            f"'{entry.name}' cannot be reached in the trainer's memory: {one_line(error)}."
        ) from error
    status, base, size = driver.cuMemGetAddressRange(storage.data_ptr())
    if int(status) != 0 or storage.data_ptr() + storage.nbytes() > int(base) + int(size):
        raise BadRequestError(f"'{entry.name}' has a handle that reaches beyond the trainer's memory.")
    shared = torch.empty(0, dtype=getattr(torch, handle["dtype"]), device=device)
    shared.set_(storage, handle["offset"], tuple(handle["shape"]), tuple(handle["stride"]))
    return bytes_of(shared.cpu().contiguous())


def _plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()
