# SPDX-License-Identifier: Apache-2.0
"""The arguments of kernels, which csrc/kernels/args.h and comm_args.h describe, as bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from blink.region.layout import StructPacker, own_fields, struct_dtype


def args(struct: str, **values: Tensor | bytes | float | None) -> bytes:
    """Return the bytes of a struct of these headers that has these values in its fields.

    An address is that of a tensor, or None; a struct is its bytes.

    Raises:
        TypeError: a field has no value, a value no field, or a struct another size.
    """
    packer, converters = _packing(struct)
    if values.keys() != converters.keys():
        names = ", ".join(sorted(values.keys() ^ converters.keys()))
        raise TypeError(f"{struct} and the values for it differ in these fields: {names}")
    return packer.pack({name: convert(values[name]) for name, convert in converters.items()})


@functools.cache
def _packing(struct: str) -> tuple[StructPacker, dict[str, Callable[[Any], Any]]]:
    """Return what packs a struct, and what makes of each field's value one that it takes."""
    layout = struct_dtype(struct)
    converters = {name: _converter(kind) for name, (kind, _) in own_fields(layout).items()}
    return StructPacker(layout, own_fields), converters


def _converter(kind: np.dtype[Any]) -> Callable[[Any], Any]:
    if kind.fields:
        return functools.partial(_check_size, kind.itemsize)
    return _address if kind == np.uint64 else _keep


def _check_size(size: int, value: bytes) -> bytes:
    if len(value) != size:
        raise TypeError(f"{len(value)} bytes are given for a struct of {size}")
    return value


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _keep(value: float) -> float:
    return value
