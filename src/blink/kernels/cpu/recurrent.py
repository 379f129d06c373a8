# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers on the CPU, by PyTorch in float32: rows of one token together, longer ones in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.layer_cache import StateCache
from blink.kernels.recurrent import CHUNK, Rows


class Rule(NamedTuple):
    """What sets a kind of layers apart; states: [..., heads, size of a key, size of a value]."""

    # From convolved channels [tokens, channels], projections and weights, operands [tokens, heads, ...].
    prepare: Callable[[Tensor, Any, Any], tuple[Tensor, ...]]
    # From the operands of a token [..., heads, ...] and a state, the output [..., heads, value] and the state after it.
    step: Callable[..., tuple[Tensor, Tensor]]
    # The same of several tokens: operands and outputs are [heads, tokens, ...].
    chunk: Callable[..., tuple[Tensor, Tensor]]
    # From outputs [tokens, heads, value], what the layer projects back.
    finish: Callable[[Tensor, Any, Any], Tensor]


def advance(rule: Rule, x: Any, cache: StateCache, rows: Rows, weights: Any, *, chunked: bool = True) -> Tensor:
    """Compute Advance of kernels/recurrent.py; chunked: else longer rows go token by token, too."""
    output = x.z.new_zeros(x.z.shape)
    starts = rows.starts.tolist()
    turns: list[list[int]] = [[]]  # rows of one token: the first of their slots, then the first siblings, and so on
    turn, before = 0, -1
    for row, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        first, end = starts[row : row + 2]
        if slot < 0 or end == first:
            before = -1
        elif end == first + 1:
            turn, before = (turn + 1 if slot == before else 0), slot
            turns += [[]] if turn == len(turns) else []
            turns[turn].append(row)
        else:
            before, taken = -1, x.take(slice(first, end))
            output[first:end] = _advance_row(rule, taken, cache, (slot, position), weights, chunked)
    if turns[0]:
        _advance_groups(rule, x, cache, rows, turns, weights, output)
    return output


def _advance_groups(
    rule: Rule, x: Any, cache: StateCache, rows: Rows, turns: list[list[int]], weights: Any, output: Tensor
) -> None:
    """Advance rows of one token, and write their outputs; turns: rows by how many siblings are before them."""
    state, last = torch.empty(0), list[int]()
    for turn, chosen in enumerate(turns):
        at = torch.tensor(chosen, device=rows.slots.device)
        tokens = rows.starts.index_select(0, at).long()
        slots, positions = (part.index_select(0, at).long() for part in (rows.slots, rows.positions))
        taken = x.take(tokens)
        if turn == 0:
            lags = torch.zeros_like(slots) if rows.lags is None else rows.lags.index_select(0, at).long()
            state = _take_in(rule, cache, slots, positions, lags, weights)
        else:
            state = state[[last.index(row - 1) for row in chosen]]
        _keep(cache, slots, positions, taken)
        operands = rule.prepare(_convolve(cache, slots, positions, weights), taken, weights)
        out, state = rule.step(*operands, state)
        output[tokens] = rule.finish(out, taken, weights)
        if turn == 0:
            cache.states[slots] = state
        last = chosen


def _take_in(rule: Rule, cache: StateCache, slots: Tensor, positions: Tensor, lags: Tensor, weights: Any) -> Tensor:
    """Return the states behind all tokens before some positions; lags: how many tokens each slot's state lacks."""
    state = cache.states[slots].masked_fill_((positions == 0)[:, None, None, None], 0)
    for back in range(int(lags.max()), 0, -1):
        [late] = (lags >= back).nonzero(as_tuple=True)
        of, at = slots[late], positions[late] - back
        place = at % cache.num_kept
        kept = weights.project(cache.inputs[of, place], cache.gates[of, place])
        operands = rule.prepare(_convolve(cache, of, at, weights), kept, weights)
        _, state[late] = rule.step(*operands, state[late])
    return state


def _keep(cache: StateCache, slots: Tensor, positions: Tensor, x: Any) -> None:
    """Keep what later tokens read of some, one of each slot."""
    place = positions % cache.num_kept
    cache.inputs[slots, place] = x.qkv
    if cache.gates.numel():
        cache.gates[slots, place] = x.gates


def _advance_row(rule: Rule, x: Any, cache: StateCache, place: tuple[int, int], weights: Any, chunked: bool) -> Tensor:
    """Advance one row of several tokens; place: its slot and the position of its first token."""
    slot, position = place
    width, tokens = weights.conv.shape[0], x.qkv.shape[0]
    inputs = cache.inputs[slot]
    size = len(inputs)
    past = inputs[[(position - back) % size for back in range(width - 1, 0, -1)]]
    past[: max(width - 1 - position, 0)] = 0
    for token in range(max(tokens - width, 0), tokens):
        inputs[(position + token) % size] = x.qkv[token]
    whole = torch.cat((past, x.qkv)).float()
    mixed = sum((whole[tap : tap + tokens] * weights.conv[tap].float() for tap in range(width)), torch.zeros(()))
    operands = rule.prepare(_activate(mixed, weights), x, weights)
    state = cache.states[slot] if position else torch.zeros_like(cache.states[slot])
    apply = apply_in_chunks if chunked else apply_token_by_token
    out, cache.states[slot] = apply(rule, operands, state)
    return rule.finish(out, x, weights)


def _convolve(cache: StateCache, slots: Tensor, positions: Tensor, weights: Any) -> Tensor:
    """Return the convolved channels of a token of each slot [tokens, channels], all of whose inputs are kept."""
    width = weights.conv.shape[0]
    taps = positions[:, None] + torch.arange(1 - width, 1, device=positions.device)  # positions that each token reads
    read = cache.inputs[slots[:, None], taps % cache.num_kept].float()
    read.masked_fill_((taps < 0)[..., None], 0)
    return _activate((read * weights.conv.float()).sum(1), weights)


def _activate(mixed: Tensor, weights: Any) -> Tensor:
    """Return what a convolution gives, from the sums of its taps."""
    return functional.silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias.float())


def apply_token_by_token(rule: Rule, operands: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [tokens, heads, value] of a row and the state after it."""
    outputs: list[Tensor] = []
    for token in range(operands[0].shape[0]):
        out, state = rule.step(*(part[token] for part in operands), state)
        outputs.append(out)
    return torch.stack(outputs), state


def apply_in_chunks(rule: Rule, operands: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute apply_token_by_token by GEMMs, 64 tokens at once."""
    outputs: list[Tensor] = []
    for first in range(0, operands[0].shape[0], CHUNK):
        out, state = rule.chunk(*(part[first : first + CHUNK].transpose(0, 1) for part in operands), state)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs), state


def decay_between(decay: Tensor) -> Tensor:
    """Return by how much each token decays what each earlier one wrote [heads, tokens, tokens], 0 for later ones.

    decay: [heads, tokens], the sum of the decays' logarithms since the chunk's start.
    """
    return (decay[:, :, None] - decay[:, None]).tril().exp().tril()
