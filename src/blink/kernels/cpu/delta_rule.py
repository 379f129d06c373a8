# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on the CPU, token by token and in chunks."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.cpu import recurrent
from blink.kernels.delta_rule import DeltaWeights, Projections

_LENGTH_EPS = 1e-6  # added to the squared length of a query or key


def _prepare(mixed: Tensor, x: Projections, weights: DeltaWeights) -> tuple[Tensor, ...]:
    return *_split_heads(mixed, weights), *_find_gates(x, weights)


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


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [..., nv, dv] of one token and the state after it; q, k: [..., nv, dk], g, beta: [..., nv]."""
    state = state * g.exp()[..., None, None]
    update = beta[..., None] * (v - (k[..., None, :] @ state).squeeze(-2))
    state = state + k[..., None] * update[..., None, :]
    return (q[..., None, :] @ state).squeeze(-2), state


def _apply_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    decay = g.cumsum(1)  # [nv, tokens]: since the chunk's start
    between = recurrent.decay_between(decay)
    system = (beta[..., None] * (k @ k.mT) * between).tril(-1)
    identity = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(system + identity, identity.expand_as(system), upper=False)
    values = inverse @ (beta[..., None] * v)
    reads = inverse @ ((beta * decay.exp())[..., None] * k)
    updates = values - reads @ state
    out = decay.exp()[..., None] * (q @ state) + (q @ k.mT * between) @ updates
    last = decay[:, -1:]
    return out, last.exp()[..., None] * state + ((last - decay).exp()[..., None] * k).mT @ updates


RULE = recurrent.Rule(_prepare, _step, _apply_chunk, _finish)
advance = partial(recurrent.advance, RULE)
