# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""The gated delta-net of prompts, in chunks of 64 tokens on tensor cores.

The kernels are in chunks.py.

Chunks begin at each row's first token. The last is filled up with tokens of beta = 0 and g = 0, which change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from blink.kernels.delta_rule import DeltaWeights, Projections
from blink.kernels.gpu.recurrent import chunks, verify
from blink.kernels.gpu.recurrent.invert import invert
from blink.kernels.layer_cache import StateCache
from blink.kernels.recurrent import CHUNK, Rows
from blink.plan.site import first_reason

if TYPE_CHECKING:
    from blink.models.layers import GatedDeltaNet

_MIXED, _FINISHED = 16, 16  # tokens that a program of mix has, and of finish
_MAX_EXACT = 64  # size of a head in float32: of larger ones, chunks do not fit in shared memory


class Config(NamedTuple):
    """Sizes that decide the speed alone."""

    columns: int = 32  # of the state, of a program of scan
    warps: int = 4
    scan_warps: int = 4
    scan_stages: int = 3


class _Chunks(NamedTuple):
    """What the kernels leave for those behind, a chunk's heads one after the other."""

    q: Tensor  # [chunks, nk, 64, dk]
    k: Tensor
    u: Tensor  # [chunks, nv, 64, dv]; V before solve
    w: Tensor  # [chunks, nv, 64, dk]
    p: Tensor  # [chunks, nv, 64, 64]
    decays: Tensor  # [chunks, nv, 64], float32: G
    systems: Tensor  # [chunks, nv, 64, 64], float32: what lies below the diagonal of I + A
    betas: Tensor  # [chunks, nv, 64], float32


def refuses(layer: GatedDeltaNet, dtype: str) -> str | None:
    """Say why the kernels do not take a layer with activations of a type; None: they take it."""
    sizes = layer.k_dim, layer.v_dim
    return first_reason(
        {
            f"heads of {layer.k_dim} and {layer.v_dim}": any(size < 16 or size & (size - 1) for size in sizes),
            f"heads of {max(sizes)} in {dtype}": dtype == "float32" and max(sizes) > _MAX_EXACT,
        }
    )


def prefill(
    x: Projections, cache: StateCache, rows: Rows, weights: DeltaWeights, config: Config | None = None
) -> Tensor:
    """Compute Advance of kernels/recurrent.py; of padding rows, anything."""
    config = config or Config()
    v_heads, k_dim, v_dim = weights.rate.shape[0], weights.k_dim, weights.norm.shape[0]
    assert all(part.stride(1) == 1 for part in x)
    is_exact, num_rows = x.qkv.dtype == torch.float32, rows.slots.shape[0]
    if is_exact or min(k_dim, v_dim) < 64:  # Triton 3.6 reads beside small operands of wgmma
        config = config._replace(warps=2, scan_warps=2, scan_stages=1)
    if rows.lags is not None:
        if len(x.qkv) == len(rows.slots):  # as in steps that decode, where rows may be siblings
            return verify.verify(x, cache, rows, weights)
        verify.take_in(x, cache, rows, weights)
    sizes = {"K_HEADS": weights.k_heads, "V_HEADS": v_heads, "DK": k_dim, "DV": v_dim, "C": CHUNK}
    sizes["ROWS"] = triton.next_power_of_2(num_rows)
    precision = "tf32x3" if is_exact else "tf32"
    parts = _prepare(x, cache, rows, weights, sizes, precision, config.warps)
    out = torch.empty_like(x.z, memory_format=torch.contiguous_format)
    columns = min(config.columns, v_dim)
    chunks.scan[(v_dim // columns, v_heads, num_rows)](
        *(cache.states, *rows[:3], *parts[:6], out, num_rows),
        **sizes,
        COLUMNS=columns,
        PRECISION=precision,
        STAGES=config.scan_stages,
        num_warps=config.scan_warps,
    )
    verify.keep_last(x.qkv, cache.inputs, rows)
    chunks.finish[(triton.cdiv(out.shape[0], _FINISHED), v_heads)](
        *(out, x.z, weights.norm, rows.starts, x.z.stride(0), weights.eps, num_rows),
        V_HEADS=v_heads,
        DV=v_dim,
        TOKENS=_FINISHED,
    )
    return out


def _prepare(
    x: Projections,
    cache: StateCache,
    rows: Rows,
    weights: DeltaWeights,
    sizes: dict[str, int],
    precision: str,
    warps: int,
) -> _Chunks:
    """Compute all that needs no state."""
    tokens, num_rows, v_heads = x.qkv.shape[0], rows.slots.shape[0], sizes["V_HEADS"]
    most_chunks = tokens // CHUNK + min(num_rows, tokens)
    parts = _allocate(most_chunks, weights.k_heads, v_heads, sizes["DK"], sizes["DV"], x.qkv)
    for of_v, heads in ((False, 2 * weights.k_heads), (True, v_heads)):
        chunks.mix[(most_chunks * (CHUNK // _MIXED), heads)](
            *(x.qkv, cache.inputs, weights.conv, *rows[:3], *parts[:3], x.qkv.stride(0), num_rows),
            **sizes,
            PART=_MIXED,
            OF_V=of_v,
            SIZE=cache.num_kept,
        )
    chunks.relate[(most_chunks, weights.k_heads)](
        *(x.b, x.a, weights.rate, weights.dt_bias, *rows[:3], *parts[:2], *parts[4:], x.b.stride(0), x.a.stride(0)),
        num_rows,
        **sizes,
        PRECISION=precision,
        num_warps=warps,
    )
    inverses = invert(parts.systems, parts.betas, x.qkv.dtype)
    chunks.solve[(most_chunks, v_heads)](
        *(*rows[:3], parts.k, inverses, parts.decays, parts.u, parts.w, num_rows),
        **sizes,
        PRECISION=precision,
        num_warps=warps,
        num_stages=1,
    )
    return parts


def _allocate(count: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int, like: Tensor) -> _Chunks:
    return _Chunks(
        like.new_empty(count, k_heads, CHUNK, k_dim),
        like.new_empty(count, k_heads, CHUNK, k_dim),
        like.new_empty(count, v_heads, CHUNK, v_dim),
        like.new_empty(count, v_heads, CHUNK, k_dim),
        like.new_empty(count, v_heads, CHUNK, CHUNK),
        *(torch.empty(count, v_heads, *size, device=like.device) for size in ((CHUNK,), (CHUNK, CHUNK), (CHUNK,))),
    )
