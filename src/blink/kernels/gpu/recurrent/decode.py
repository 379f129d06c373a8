# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of rows that decode, on a GPU: the state is read and written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from blink.kernels.delta_rule import DeltaWeights, Projections
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.device import has_clusters
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.recurrent.verify import verify
from blink.kernels.layer_cache import StateCache
from blink.kernels.recurrent import Rows
from blink.plan.site import first_reason

if TYPE_CHECKING:
    from blink.models.layers import GatedDeltaNet

_SOURCE = "recurrent/delta_decode.cu"
_VECTOR = 4  # columns of a thread
_WARP = 32
_FEW_HEADS = 132  # of all rows together: one for each SM of an H100


class TileConfig(NamedTuple):
    """How many threads have the state of a value head, and how many such blocks an SM has room for."""

    threads: int
    blocks: int


def choose_config(heads: int) -> TileConfig:
    """Return the tile config that was fastest on an H100 for so many heads of 128 x 128, of all rows together."""
    return TileConfig(512, 1) if heads <= _FEW_HEADS else TileConfig(256, 2)


def refuses(layer: GatedDeltaNet, dtype: str) -> str | None:
    """Say why the kernel does not take a layer with activations of a type; None: it takes it."""
    lanes, rest = divmod(layer.v_dim, _VECTOR)
    return first_reason(
        {
            "no Hopper": not has_clusters(),
            f"activations in {dtype}": dtype != "bfloat16",
            f"value heads of {layer.v_dim}": rest > 0 or lanes not in (16, 32),
            f"key heads of {layer.k_dim}": layer.k_dim not in (64, 128),
        }
    )


def decode(x: Projections, cache: StateCache, rows: Rows, weights: DeltaWeights) -> Tensor:
    """Compute Advance of kernels/recurrent.py of rows of one token; of padding rows, anything.

    The rows, the weights and the slots are read before the wait. So between a kernel that writes them in the same step
    and this one there has to be a launch that is no PDL launch, as behind the copies from snapshots.
    """
    if rows.lags is not None:
        return verify(x, cache, rows, weights)
    tokens, v_heads = x.b.shape
    return decode_by(choose_config(tokens * v_heads), x, cache, rows, weights)


def decode_by(config: TileConfig, x: Projections, cache: StateCache, rows: Rows, weights: DeltaWeights) -> Tensor:
    """Compute decode with a tile config."""
    v_heads, v_dim = weights.rate.shape[0], weights.norm.shape[0]
    tokens = x.qkv.shape[0]
    assert x.z.stride(0) % _VECTOR == 0 and all(part.dtype == torch.bfloat16 and part.stride(1) == 1 for part in x)
    out = torch.empty(tokens, v_heads * v_dim, dtype=torch.bfloat16, device=x.qkv.device)
    sizes = (weights.k_heads, v_heads, weights.k_dim, v_dim, *config)
    arguments = args(
        "DeltaDecodeArgs",
        qkv=x.qkv,
        z=x.z,
        b=x.b,
        a=x.a,
        conv=weights.conv,
        rate=weights.rate,
        dt_bias=weights.dt_bias,
        norm=weights.norm,
        slots=rows.slots,
        positions=rows.positions,
        states=cache.states,
        inputs=cache.inputs,
        out=out,
        qkv_stride=x.qkv.stride(0),
        z_stride=x.z.stride(0),
        b_stride=x.b.stride(0),
        a_stride=x.a.stride(0),
        eps=weights.eps,
    )
    kernel = compile_kernel(f"blink::delta_decode<{', '.join(map(str, sizes))}>", _SOURCE)
    launch(kernel, (v_heads, tokens), config.threads, arguments)
    return out
