# SPDX-License-Identifier: Apache-2.0
"""Tensors of a trainer as the stream of safetensors that an engine takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from blink.errors import BadRequestError
from blink.region.tensor_stream import TensorEntry, write_header

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_PIECE = 1 << 24


def stream_tensors(tensors: NamedTensors) -> Iterator[bytes]:
    """Yield tensors of any device as safetensors has them; one of them at a time is copied.

    Raises:
        BadRequestError: one has a type that safetensors does not know.
    """
    named = [*_pairs_of(tensors)]
    yield write_header([_describe(name, tensor) for name, tensor in named])
    for _, tensor in named:
        values = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(values), _PIECE):
            yield values[start : start + _PIECE].tobytes()


def _pairs_of(tensors: NamedTensors) -> Iterable[tuple[str, Tensor]]:
    if isinstance(tensors, Mapping):
        return cast("Mapping[str, Tensor]", tensors).items()
    return tensors


def _describe(name: str, tensor: Tensor) -> TensorEntry:
    if tensor.dtype not in _TYPES:
        raise BadRequestError(f"'{name}' has type {tensor.dtype}, which no stream of tensors has.", "named_tensors")
    return TensorEntry(name, _TYPES[tensor.dtype], tuple(tensor.shape))
