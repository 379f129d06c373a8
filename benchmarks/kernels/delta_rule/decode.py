# SPDX-License-Identifier: Apache-2.0
"""Launches decode.cu: one token of each row, the state read and written once."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from blink.kernels.gpu.launch import compile_kernel, launch
from delta_rule.reference import Cache, Parameters, Projections, Rows

_SOURCE = str(Path(__file__).with_suffix(".cu"))
_POINTERS = ("qkv", "z", "b", "a", "conv", "rate", "dt_bias", "norm", "slots", "positions", "states", "inputs", "out")
_STRIDES = ("qkv_stride", "z_stride", "b_stride", "a_stride")


class TileConfig(NamedTuple):
    """How many threads have the state of a value head, and how many such blocks an SM has room for."""

    threads: int
    blocks: int


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _STRIDES),
        ("eps", ctypes.c_float),
    )


def choose_config(items: int) -> TileConfig:
    """Return the tile config that was fastest on an H100 for so many heads of 128 x 128, of all rows together."""
    return TileConfig(512, 1) if items <= 132 else TileConfig(256, 2)


def decode(
    x: Projections, cache: Cache, rows: Rows, parameters: Parameters, config: TileConfig | None = None
) -> Tensor:
    """Return reference.advance() of rows that have a token each, in bf16; of padding rows, anything."""
    _, v_heads, k_dim, v_dim = cache.states.shape
    tokens = x.qkv.shape[0]
    config = config or choose_config(tokens * v_heads)
    assert x.z.stride(0) % 4 == 0 and all(part.dtype == torch.bfloat16 and part.stride(1) == 1 for part in x)
    out = torch.empty(tokens, v_heads * v_dim, dtype=torch.bfloat16, device=x.qkv.device)
    tensors = (*x, *parameters[:4], rows.slots, rows.positions, *cache, out)
    values = (*(tensor.data_ptr() for tensor in tensors), *(part.stride(0) for part in x), parameters.eps)
    sizes = (parameters.k_heads, v_heads, k_dim, v_dim, *config)
    kernel = compile_kernel(f"blink::delta_decode<{', '.join(map(str, sizes))}>", _SOURCE)
    launch(kernel, (v_heads, tokens), config.threads, bytes(_Arguments(*values)))
    return out
