# SPDX-License-Identifier: Apache-2.0
"""The gated delta-net between its projections in plain PyTorch and float32: the oracle of the kernels.

A layer has nk key heads and nv value heads; value head h reads key head h // (nv / nk). Channels are q, k and v one
after the other. A sequence keeps in its slot

- states [slots, nv, dk, dv], float32: the recurrent state;
- inputs [slots, 4, channels]: what the convolution has read last, the input of position p at place p % 4.

At position 0 both count as zeros, whatever the slot holds: nobody clears a slot. A slot below 0 is that of padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH = 4  # of the convolution
CHUNK = 64


class Parameters(NamedTuple):
    """A layer's weights beside its projections."""

    conv: Tensor  # [4, channels], the newest input last
    rate: Tensor  # [nv], float32: -exp(A_log)
    dt_bias: Tensor  # [nv], float32
    norm: Tensor  # [dv], float32
    eps: float
    k_heads: int
    k_dim: int


class Projections(NamedTuple):
    """What the input projections give, a row for each token."""

    qkv: Tensor  # [tokens, channels]
    z: Tensor  # [tokens, nv * dv]
    b: Tensor  # [tokens, nv]
    a: Tensor  # [tokens, nv]

    def cut(self, first: int, end: int) -> Projections:
        """Return some of the tokens."""
        return Projections(*(part[first:end] for part in self))


class Cache(NamedTuple):
    """The slots of one layer."""

    states: Tensor
    inputs: Tensor


class Rows(NamedTuple):
    """Which tokens belong to which sequence."""

    slots: Tensor  # [rows], int32
    positions: Tensor  # [rows], int32: of each row's first token
    starts: Tensor  # [rows + 1], int32: where its tokens begin


def advance(x: Projections, cache: Cache, rows: Rows, parameters: Parameters, *, chunked: bool = False) -> Tensor:
    """Return each token's gated output [tokens, nv * dv] in float32, and advance the slots."""
    output = x.z.new_zeros(x.z.shape, dtype=torch.float32)
    starts = rows.starts.tolist()
    for row, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        first, end = starts[row : row + 2]
        if slot >= 0 and end > first:
            output[first:end] = _advance_row(x.cut(first, end), cache, slot, position, parameters, chunked)
    return output


def _advance_row(
    x: Projections, cache: Cache, slot: int, position: int, parameters: Parameters, chunked: bool
) -> Tensor:
    state = cache.states[slot] if position else torch.zeros_like(cache.states[slot])
    q, k, v = _convolve(x.qkv, cache.inputs[slot], position, parameters, state)
    g = parameters.rate * F.softplus(x.a.float() + parameters.dt_bias)
    rule = apply_in_chunks if chunked else apply_token_by_token
    out, cache.states[slot] = rule(q, k, v, g, x.b.float().sigmoid(), state)
    z = x.z.float().view(out.shape)
    rate = torch.rsqrt(out.square().mean(-1, keepdim=True) + parameters.eps)
    return (out * rate * parameters.norm * F.silu(z)).flatten(1)


def _convolve(
    qkv: Tensor, inputs: Tensor, position: int, parameters: Parameters, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve one row's inputs and keep the last of them; return q, k [tokens, nv, dk], normalised, and v."""
    before = [(position - back) % WIDTH for back in range(WIDTH - 1, 0, -1)]
    past = inputs[before].clone()
    past[: max(WIDTH - 1 - position, 0)] = 0
    for token in range(max(qkv.shape[0] - WIDTH, 0), qkv.shape[0]):
        inputs[(position + token) % WIDTH] = qkv[token]
    whole = torch.cat([past, qkv.to(past.dtype)]).float()
    tokens = qkv.shape[0]
    mixed = F.silu(sum(whole[tap : tap + tokens] * parameters.conv[tap].float() for tap in range(WIDTH)))  # type: ignore[arg-type]
    v_heads, k_dim, v_dim = state.shape
    keys = parameters.k_heads * k_dim
    q, k, v = mixed.split([keys, keys, v_heads * v_dim], dim=1)
    repeats = v_heads // parameters.k_heads
    q, k = (_normalize(part.reshape(tokens, -1, k_dim)).repeat_interleave(repeats, 1) for part in (q, k))
    return q * k_dim**-0.5, k, v.reshape(tokens, v_heads, v_dim)


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def apply_token_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [tokens, nv, dv] and the state after them. q, k: normalised, of each value head; g, beta: [tokens,
    nv]; state: [nv, dk, dv]."""
    outputs: list[Tensor] = []
    for token in range(q.shape[0]):
        state = state * g[token].exp()[:, None, None]
        update = beta[token, :, None] * (v[token] - torch.einsum("hkv,hk->hv", state, k[token]))
        state = state + k[token, :, :, None] * update[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(outputs), state


def apply_in_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute apply_token_by_token() with GEMMs of matrices, 64 tokens at once."""
    outputs: list[Tensor] = []
    for first in range(0, q.shape[0], CHUNK):
        chunk = [part[first : first + CHUNK].transpose(0, 1) for part in (q, k, v, g, beta)]
        out, state = _apply_chunk(*chunk, state)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs), state


def _apply_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    decay = g.cumsum(1)  # [nv, tokens]: since the chunk's start
    between = (decay[:, :, None] - decay[:, None]).tril().exp().tril()
    system = (beta[..., None] * (k @ k.mT) * between).tril(-1)
    identity = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(system + identity, identity.expand_as(system), upper=False)
    values = inverse @ (beta[..., None] * v)
    reads = inverse @ ((beta * decay.exp())[..., None] * k)
    updates = values - reads @ state
    out = decay.exp()[..., None] * (q @ state) + (q @ k.mT * between) @ updates
    last = decay[:, -1:]
    return out, last.exp()[..., None] * state + ((last - decay).exp()[..., None] * k).mT @ updates
