# SPDX-License-Identifier: Apache-2.0
"""Handles of tensors in a trainer's GPU memory: PyTorch's reduce_tensor() makes them, and vLLM's trainers pickle them.

A pickle can run code. This one may name a few of PyTorch's functions and types, and each is read as a word: nothing is
imported, and nothing is called but `tuple`.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from typing import Any, Final

from blink.errors import BadRequestError
from blink.fields import show

_PARAM: Final = "ipc_handles_pickled"
_REBUILD: Final = "rebuild_cuda_tensor"
_TYPES: Final = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
_WORDS: Final[dict[tuple[str, str], Any]] = {
    ("torch.multiprocessing.reductions", _REBUILD): _REBUILD,
    ("torch", "Tensor"): "Tensor",
    ("torch.nn.parameter", "Parameter"): "Tensor",
    ("torch.storage", "TypedStorage"): "Storage",
    ("torch.storage", "UntypedStorage"): "Storage",
    ("torch", "Size"): tuple,
    **{("torch", name): name for name in _TYPES},
}
# The arguments of rebuild_cuda_tensor(), in their order, with the types that they have here.
_ARGUMENTS: Final[tuple[tuple[str, type], ...]] = (
    ("tensor", str), ("shape", tuple), ("stride", tuple), ("offset", int), ("storage", str), ("dtype", str),
    ("device", int), ("handle", bytes), ("num_bytes", int), ("offset_bytes", int), ("requires_grad", bool),
    ("counter", bytes), ("counter_offset", int), ("event", bytes), ("awaits_event", bool),
)  # fmt: skip
_KEPT: Final = (
    "shape", "stride", "offset", "dtype", "handle", "num_bytes", "offset_bytes", "counter", "counter_offset", "event",
    "awaits_event",
)  # fmt: skip


class _WordUnpickler(pickle.Unpickler):
    """Reads a pickle whose names are words."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the word for a name.

        Raises:
            UnpicklingError: there is none.
        """
        if (module_name, global_name) not in _WORDS:
            raise pickle.UnpicklingError(f"it names {show(f'{module_name}.{global_name}')}")
        return _WORDS[module_name, global_name]


def read_handles(pickled: str, count: int) -> list[dict[str, Any]]:
    """Return the handles of so many tensors, each by the UUIDs of GPUs, with bytes as hexadecimal text.

    Raises:
        BadRequestError: there are others than that.
    """
    try:
        found = _WordUnpickler(io.BytesIO(base64.b64decode(pickled, validate=True))).load()
    except binascii.Error as error:
        raise _refuse("it is not base64") from error
    except pickle.UnpicklingError as error:
        raise _refuse(str(error)) from error
    except Exception as error:  # whatever a malformed pickle does
        raise _refuse("it is malformed") from error
    if not isinstance(found, list) or len(found) != count:
        raise _refuse(f"it is no list of {count}")
    return [_read_places(one) for one in found]


def _read_places(places: Any) -> dict[str, Any]:
    if not isinstance(places, dict) or not places or not all(isinstance(gpu, str) for gpu in places):
        raise _refuse("an entry has no GPUs")
    return {gpu: _read_handle(one) for gpu, one in places.items()}


def _read_handle(handle: Any) -> dict[str, Any]:
    """Return what rebuild_cuda_tensor() would be called with."""
    if not (isinstance(handle, tuple) and len(handle) == 2 and handle[0] == _REBUILD and isinstance(handle[1], tuple)):
        raise _refuse("an entry is no handle of reduce_tensor()")
    if len(handle[1]) != len(_ARGUMENTS):
        raise _refuse(f"a handle has {len(handle[1])} arguments, not {len(_ARGUMENTS)}")
    values = dict[str, Any]()
    for (name, kind), value in zip(_ARGUMENTS, handle[1], strict=True):
        if type(value) is not kind or (isinstance(value, tuple) and not _are_numbers(value)):
            raise _refuse(f"a handle's {name} is {show(value)}")
        values[name] = value.hex() if isinstance(value, bytes) else value
    return {name: values[name] for name in _KEPT}


def _are_numbers(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int for value in values)


def _refuse(reason: str) -> BadRequestError:
    return BadRequestError(
        f"The pickle is not read: {reason}. It may hold a list, for each name {{UUID: reduce_tensor(tensor)}}.",
        _PARAM,
    )
