# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on the CPU, by PyTorch in float32: rows of one token together, longer ones in chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.delta_rule import CHUNK, DeltaWeights, Projections, Rows
from blink.kernels.layer_cache import StateCache

_LENGTH_EPS = 1e-6  # added to the squared length of a query or key


def advance(x: Projections, cache: StateCache, rows: Rows, weights: DeltaWeights, *, chunked: bool = True) -> Tensor:
    """Compute Advance of kernels/delta_rule.py; chunked: else longer rows go token by token, too."""
    output = x.z.new_zeros(x.z.shape)
    starts = rows.starts.tolist()
    single: list[int] = []
    for row, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        first, end = starts[row : row + 2]
        if slot < 0 or end == first:
            continue
        if end == first + 1:
            single.append(row)
        else:
            output[first:end] = _advance_row(x.take(slice(first, end)), cache, slot, position, weights, chunked)
    if single:
        chosen = torch.tensor(single, device=rows.slots.device)
        tokens = rows.starts.index_select(0, chosen).long()
        slots, positions = (part.index_select(0, chosen).long() for part in (rows.slots, rows.positions))
        output[tokens] = _advance_tokens(x.take(tokens), cache, slots, positions, weights)
    return output


def _advance_row(
    x: Projections, cache: StateCache, slot: int, position: int, weights: DeltaWeights, chunked: bool
) -> Tensor:
    """Advance one row of several tokens."""
    width, tokens = weights.conv.shape[0], x.qkv.shape[0]
    inputs = cache.inputs[slot]
    past = inputs[[(position - back) % width for back in range(width - 1, 0, -1)]]
    past[: max(width - 1 - position, 0)] = 0
    for token in range(max(tokens - width, 0), tokens):
        inputs[(position + token) % width] = x.qkv[token]
    whole = torch.cat((past, x.qkv)).float()
    mixed = sum((whole[tap : tap + tokens] * weights.conv[tap].float() for tap in range(width)), torch.zeros(()))
    q, k, v = _split_heads(functional.silu(mixed), weights)
    state = cache.states[slot] if position else torch.zeros_like(cache.states[slot])
    rule = apply_in_chunks if chunked else apply_token_by_token
    out, cache.states[slot] = rule(q, k, v, *_find_gates(x, weights), state)
    return _finish(out, x, weights)


def _advance_tokens(
    x: Projections, cache: StateCache, slots: Tensor, positions: Tensor, weights: DeltaWeights
) -> Tensor:
    """Advance rows of one token each."""
    width = weights.conv.shape[0]
    cache.inputs[slots, positions % width] = x.qkv
    taps = positions[:, None] + torch.arange(1 - width, 1, device=positions.device)  # positions that each row reads
    read = cache.inputs[slots[:, None], taps % width].float()
    read.masked_fill_((taps < 0)[..., None], 0)
    q, k, v = _split_heads(functional.silu((read * weights.conv.float()).sum(1)), weights)
    g, beta = _find_gates(x, weights)
    state = cache.states[slots].masked_fill_((positions == 0)[:, None, None, None], 0)
    out, cache.states[slots] = step(q, k, v, g, beta, state)
    return _finish(out, x, weights)


def _split_heads(mixed: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k of each value head [tokens, nv, dk], both of length 1 and q scaled, and v [tokens, nv, dv]."""
    tokens, v_heads, k_dim = mixed.shape[0], weights.rate.shape[0], weights.k_dim
    keys = weights.k_heads * k_dim
    q, k, v = mixed.split([keys, keys, mixed.shape[1] - 2 * keys], dim=1)
    repeats = v_heads // weights.k_heads
    q, k = (_normalize(part.reshape(tokens, -1, k_dim)).repeat_interleave(repeats, 1) for part in (q, k))
    return q * k_dim**-0.5, k, v.reshape(tokens, v_heads, -1)


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def _find_gates(x: Projections, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Return g, the logarithm of the decay, and beta, both [tokens, nv]."""
    return weights.rate * functional.softplus(x.a.float() + weights.dt_bias), x.b.float().sigmoid()


def _finish(out: Tensor, x: Projections, weights: DeltaWeights) -> Tensor:
    """Normalise each head's output [tokens, nv, dv], then gate it."""
    rate = torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.eps)
    gate = functional.silu(x.z.float().reshape(out.shape))
    return (out * rate * weights.norm * gate).flatten(1).to(x.z.dtype)


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [..., nv, dv] of one token and the state after it; q, k: [..., nv, dk], g, beta: [..., nv]."""
    state = state * g.exp()[..., None, None]
    update = beta[..., None] * (v - (k[..., None, :] @ state).squeeze(-2))
    state = state + k[..., None] * update[..., None, :]
    return (q[..., None, :] @ state).squeeze(-2), state


def apply_token_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [tokens, nv, dv] of a row and the state after it; g, beta: [tokens, nv], state: [nv, dk, dv]."""
    outputs: list[Tensor] = []
    for token in range(q.shape[0]):
        out, state = step(q[token], k[token], v[token], g[token], beta[token], state)
        outputs.append(out)
    return torch.stack(outputs), state


def apply_in_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute apply_token_by_token by GEMMs, 64 tokens at once."""
    outputs: list[Tensor] = []
    for first in range(0, q.shape[0], CHUNK):
        taken = slice(first, first + CHUNK)
        chunk_q, chunk_k, chunk_v = (part[taken].transpose(0, 1) for part in (q, k, v))
        out, state = _apply_chunk(chunk_q, chunk_k, chunk_v, g[taken].T, beta[taken].T, state)
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
