# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 rule on the CPU, token by token and in chunks (state-space duality)."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.cpu import recurrent
from blink.kernels.mamba import MambaProjections, MambaWeights


def _prepare(mixed: Tensor, x: MambaProjections, weights: MambaWeights) -> tuple[Tensor, ...]:
    """Return C and B of each head, t * x, the logarithm of the decay, and skip * x."""
    tokens, heads, pairs = mixed.shape[0], weights.rate.shape[0], weights.groups * weights.state_size
    values, keys, reads = mixed.split([mixed.shape[1] - 2 * pairs, pairs, pairs], dim=1)
    values = values.reshape(tokens, heads, -1)
    keys, reads = (
        part.reshape(tokens, weights.groups, -1).repeat_interleave(heads // weights.groups, 1) for part in (keys, reads)
    )
    times = functional.softplus(x.dt.float() + weights.dt_bias)
    return reads, keys, times[..., None] * values, weights.rate * times, weights.skip[:, None] * values


def _step(
    reads: Tensor, keys: Tensor, values: Tensor, g: Tensor, skipped: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    state = state * g.exp()[..., None, None] + keys[..., None] * values[..., None, :]
    return (reads[..., None, :] @ state).squeeze(-2) + skipped, state


def _apply_chunk(
    reads: Tensor, keys: Tensor, values: Tensor, g: Tensor, skipped: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    decay = g.cumsum(1)
    out = decay.exp()[..., None] * (reads @ state) + (reads @ keys.mT * recurrent.decay_between(decay)) @ values
    last = decay[:, -1:]
    return out + skipped, last.exp()[..., None] * state + ((last - decay).exp()[..., None] * keys).mT @ values


def _finish(out: Tensor, x: MambaProjections, weights: MambaWeights) -> Tensor:
    """Gate the outputs [tokens, heads, p], then normalise those of each group together."""
    gated = (out.flatten(1) * functional.silu(x.z.float())).unflatten(1, (weights.groups, -1))
    return ((gated * weights.find_rates(gated)).flatten(1) * weights.norm).to(x.z.dtype)


RULE = recurrent.Rule(_prepare, _step, _apply_chunk, _finish)
advance = partial(recurrent.advance, RULE)
