# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 kernels against the CPU's rule, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blink.kernels.cpu import mamba as reference
from blink.kernels.layer_cache import StateCache
from blink.kernels.mamba import MambaProjections, MambaWeights
from delta_rule_kernels import make_rows

kernels = pytest.importorskip("blink.kernels.gpu.recurrent.mamba")

# Heads, groups, size of a head, of a state.
SIZES = [(2, 1, 16, 32), (4, 2, 24, 16)]
DTYPES = [torch.float32, torch.bfloat16]


def draw(sizes: tuple[int, int, int, int], tokens: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return weights, projections and slots full of NaN."""
    torch.manual_seed(tokens)
    heads, groups, head_dim, state_size = sizes
    size = heads * head_dim
    channels = size + 2 * groups * state_size
    vectors = -torch.rand(heads) - 0.1, torch.randn(heads), torch.randn(heads), torch.rand(size) + 0.5
    conv, bias = torch.randn(4, channels).to(device, dtype), torch.randn(channels).to(device, dtype)
    rate, dt_bias, skip, norm = (vector.to(device) for vector in vectors)
    bias = bias if groups == 1 else None
    weights = MambaWeights(conv, bias, rate, dt_bias, skip, norm, 1e-6, groups, state_size)
    widths = channels, size, heads
    whole = torch.randn(tokens, sum(widths)).to(device, dtype)
    states = torch.full((9, heads, state_size, head_dim), torch.nan, device=device)
    inputs = torch.full((9, 4, channels), torch.nan, device=device, dtype=dtype)
    return weights, MambaProjections(*whole.split(widths, 1)), StateCache(states, inputs)


def check(found: Any, expected: Any, cache: StateCache, wanted: StateCache, slots: list[int]) -> None:
    """Compare outputs and the slots of rows; others hold what they held."""
    tolerance = 2e-5 if found.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache.states[slots], wanted.states[slots], rtol=1e-4, atol=1e-4)
    others = [slot for slot in range(9) if slot not in slots]
    torch.testing.assert_close(cache.inputs[slots], wanted.inputs[slots], rtol=0, atol=0, equal_nan=True)
    assert cache.states[others].isnan().all() and cache.inputs[others].isnan().all()


def copy(cache: StateCache) -> StateCache:
    return StateCache(cache.states.clone(), cache.inputs.clone())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_all_lengths_start_from_their_states(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """One begins, whatever its slot held; one has no token; some decode; the last is padding."""
    counts, slots, positions = [5, 0, 6, 1, 3, 2, 1, 2], [6, 0, 2, 7, 1, 4, 3, -1], [0, 9, 3, 1, 1000, 2, 0, 5]
    weights, x, cache = draw(sizes, sum(counts), dtype, device)
    for slot in (2, 7, 1, 4):
        cache.states[slot] = torch.randn_like(cache.states[slot])
        cache.inputs[slot] = torch.randn_like(cache.inputs[slot])
    rows, wanted = make_rows(slots, positions, counts, device), copy(cache)
    expected = reference.advance(x, wanted, rows, weights)
    found = kernels.advance(x, cache, rows, weights)
    check(found[:18], expected[:18], cache, wanted, [6, 2, 7, 1, 4, 3])


def merge_halves(means: torch.Tensor) -> torch.Tensor:
    """Merge the means of the first of two ranks with the other's, which are three times as large."""
    return means * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_that_have_heads_of_one_group_normalise_together(dtype: torch.dtype, device: torch.device) -> None:
    weights, x, cache = draw(SIZES[0], 7, dtype, device)
    weights, wanted, rows = weights.merging(merge_halves), copy(cache), make_rows([5], [0], [7], device)
    expected = reference.advance(x, wanted, rows, weights)
    check(kernels.advance(x, cache, rows, weights), expected, cache, wanted, [5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_and_tokens_behind_it_leave_the_state_of_a_whole_one(dtype: torch.dtype, device: torch.device) -> None:
    weights, x, cache = draw(SIZES[0], 14, dtype, device)
    wanted, position = copy(cache), 0
    expected = reference.advance(x, wanted, make_rows([5], [0], [14], device), weights)
    found: list[torch.Tensor] = []
    for count in (2, 1, 7, 1, 1, 2):
        rows = make_rows([5], [position], [count], device)
        found.append(kernels.advance(x.take(slice(position, position + count)), cache, rows, weights))
        position += count
    check(torch.cat(found), expected, cache, wanted, [5])
