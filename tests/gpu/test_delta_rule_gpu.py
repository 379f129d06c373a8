# SPDX-License-Identifier: Apache-2.0
"""The delta-rule kernels against the rule in plain PyTorch.

With TRITON_INTERPRET=1 those of prompts run on the CPU, in float32.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from blink.kernels.cpu import delta_rule as reference
from blink.kernels.layer_cache import StateCache
from delta_rule_kernels import draw_projections, draw_weights, make_cache, make_rows
from triton_interpreter import IS_INTERPRETED, large

pytest.importorskip("triton")
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from blink.kernels.gpu.recurrent import decode as decoding
from blink.kernels.gpu.recurrent import invert as inversion
from blink.kernels.gpu.recurrent import prefill

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16]
SMALL, GROUPS_OF_THREE, LARGE = (1, 2, 16, 16), (2, 6, 64, 32), (16, 32, 128, 128)  # nk, nv, dk, dv
SIZES = [SMALL, pytest.param(GROUPS_OF_THREE, marks=large), pytest.param(LARGE, marks=large)]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # of the norm of a difference, to that of what is wanted
on_gpu = pytest.mark.skipif(IS_INTERPRETED, reason="CUDA C++")


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def check(
    found: tuple[Tensor, Any], wanted: tuple[Tensor, Any], slots: list[int], dtype: torch.dtype, factor: int = 1
) -> None:
    """Compare outputs and slots, within the tolerance times a factor; the others must be as they were: NaN."""
    assert distance(found[0], wanted[0]) < TOLERANCE[dtype] * factor
    assert distance(found[1].states[slots], wanted[1].states[slots]) < TOLERANCE[dtype] * factor
    assert torch.equal(found[1].inputs[slots].nan_to_num(), wanted[1].inputs[slots].nan_to_num())
    others = [slot for slot in range(found[1].states.shape[0]) if slot not in slots]
    assert found[1].states[others].isnan().all() and found[1].inputs[others].isnan().all()


def copy(cache: Any) -> Any:
    return StateCache(cache.states.clone(), cache.inputs.clone())


def skip_unless_it_fits(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    if sizes == LARGE and dtype == torch.float32:
        pytest.skip("chunks of float32 do not fit in shared memory")


def draw(sizes: tuple[int, int, int, int], tokens: int, slots: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    torch.manual_seed(tokens)
    weights = draw_weights(*sizes, device=DEVICE, dtype=dtype)
    x = draw_projections(tokens, weights, device=DEVICE, dtype=dtype)
    return weights, x, make_cache(slots, weights, device=DEVICE, dtype=dtype)


def fill(cache: Any, slots: list[int]) -> None:
    for slot in slots:
        cache.states[slot] = torch.randn_like(cache.states[slot])
        cache.inputs[slot] = torch.randn_like(cache.inputs[slot])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 127, 200])
def test_a_prompt_equals_the_reference_whatever_the_slot_held(
    tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    skip_unless_it_fits(sizes, dtype)
    weights, x, cache = draw(sizes, tokens, 3, dtype)
    rows, wanted = make_rows([1], [0], [tokens], DEVICE), copy(cache)
    expected = reference.advance(x, wanted, rows, weights)
    check((prefill.prefill(x, cache, rows, weights), cache), (expected, wanted), [1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_all_lengths_start_from_their_states(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    skip_unless_it_fits(sizes, dtype)
    counts, slots, positions = [5, 0, 64, 1, 130, 2], [6, 0, 2, 7, 1, 4], [0, 9, 3, 1, 1000, 2]
    weights, x, cache = draw(sizes, sum(counts), 9, dtype)
    fill(cache, [2, 7, 1, 4])
    rows, wanted = make_rows(slots, positions, counts, DEVICE), copy(cache)
    expected = reference.advance(x, wanted, rows, weights)
    check((prefill.prefill(x, cache, rows, weights), cache), (expected, wanted), [6, 2, 7, 1, 4], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_rows_touch_no_slot(dtype: torch.dtype) -> None:
    weights, x, cache = draw(SMALL, 80, 2, dtype)
    rows, wanted = make_rows([1, -1, -1], [0, 0, 7], [70, 10, 0], DEVICE), copy(cache)
    expected = reference.advance(x, wanted, rows, weights)
    found = prefill.prefill(x, cache, rows, weights)
    check((found[:70], cache), (expected[:70], wanted), [1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_cut_anywhere_leaves_the_same_state(
    seed: int, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    skip_unless_it_fits(sizes, dtype)
    tokens = 150 if IS_INTERPRETED else 700
    weights, x, cache = draw(sizes, tokens, 2, dtype)
    wanted, found = copy(cache), list[Tensor]()
    expected = reference.advance(x, wanted, make_rows([1], [0], [tokens], DEVICE), weights)
    cuts = [0, *sorted(random.Random(seed).sample(range(1, tokens), 6)), tokens]
    for first, end in itertools.pairwise(cuts):
        rows = make_rows([1], [first], [end - first], DEVICE)
        found.append(prefill.prefill(x.take(slice(first, end)), cache, rows, weights))
    check((torch.cat(found), cache), (expected, wanted), [1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_repeated_is_learnt_without_loss(dtype: torch.dtype) -> None:
    """Equal keys, nothing forgotten, all overwritten: powers of the system's matrix would overflow.

    From the second token on every update is a difference of equal values, so that bf16 loses most here.
    """
    weights, x, cache = draw(SMALL if dtype == torch.float32 else LARGE, 200, 2, dtype)
    x.qkv[:] = x.qkv[0].clone()
    x.b[:], x.a[:] = 8.0, -12.0
    rows, wanted = make_rows([1], [0], [200], DEVICE), copy(cache)
    expected = reference.advance(x, wanted, rows, weights)
    check((prefill.prefill(x, cache, rows, weights), cache), (expected, wanted), [1], dtype, factor=2)


@on_gpu
@pytest.mark.parametrize("matrices", [1, 2, 7, 300])
def test_systems_are_inverted(matrices: int) -> None:
    torch.manual_seed(matrices)
    below, factor = torch.randn(matrices, 64, 64, device="cuda").tril(-1) * 0.3, torch.rand(matrices, 64, device="cuda")
    below[0] = torch.ones(64, 64, device="cuda").tril(-1)
    identity = torch.eye(64, device="cuda", dtype=torch.float64)
    expected = torch.linalg.inv(below.double() + identity) * factor.double()[:, None]
    assert distance(inversion.invert(below, factor, torch.bfloat16), expected) < 4e-3


CONFIGS = [(512, 1), (256, 2), (128, 2)]


@on_gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 32, 64])
def test_a_token_of_each_row_equals_the_reference(num_rows: int, config: tuple[int, int]) -> None:
    weights, x, cache = draw(LARGE, num_rows, num_rows + 2, torch.bfloat16)
    slots = random.Random(num_rows).sample(range(num_rows + 2), num_rows)
    positions = [row % 7 for row in range(num_rows)]
    fill(cache, [slot for slot, position in zip(slots, positions, strict=True) if position])
    rows, wanted = make_rows(slots, positions, [1] * num_rows, DEVICE), copy(cache)
    expected = reference.advance(x, wanted, rows, weights)
    found = decoding.decode_by(decoding.TileConfig(*config), x, cache, rows, weights)
    check((found, cache), (expected, wanted), slots, torch.bfloat16)


@on_gpu
@pytest.mark.parametrize("sizes", [(16, 48, 128, 128), (2, 2, 64, 128), (2, 6, 128, 64)])
def test_tokens_of_other_heads_equal_the_reference(sizes: tuple[int, int, int, int]) -> None:
    weights, x, cache = draw(sizes, 5, 6, torch.bfloat16)
    fill(cache, [1, 2, 3])
    rows, wanted = make_rows([1, 2, 3, 4, 5], [9, 3, 2, 0, 0], [1] * 5, DEVICE), copy(cache)
    expected = reference.advance(x, wanted, rows, weights)
    found = decoding.decode_by(decoding.TileConfig(128, 1), x, cache, rows, weights)
    check((found, cache), (expected, wanted), [1, 2, 3, 4, 5], torch.bfloat16)


@on_gpu
def test_padding_rows_of_a_step_write_nothing() -> None:
    slots = [2, *[-1] * 9, 3, *[-1] * 5, 4, -1]
    weights, x, cache = draw(LARGE, len(slots), 6, torch.bfloat16)
    fill(cache, [2, 4])
    rows = make_rows(slots, [8, *[5] * 9, 0, *[5] * 5, 1, 5], [1] * len(slots), DEVICE)
    wanted, taken = copy(cache), [0, 10, 16]
    expected = reference.advance(x, wanted, rows, weights)
    for config in (decoding.TileConfig(256, 2), decoding.TileConfig(512, 1)):
        own = copy(cache)
        found = decoding.decode_by(config, x, own, rows, weights)
        check((found[taken], own), (expected[taken], wanted), [2, 3, 4], torch.bfloat16)


@on_gpu
def test_tokens_behind_a_prompt_go_on_from_its_state() -> None:
    weights, x, cache = draw(LARGE, 110, 2, torch.bfloat16)
    wanted = copy(cache)
    expected = reference.advance(x, wanted, make_rows([1], [0], [110], DEVICE), weights)
    found = [prefill.prefill(x.take(slice(0, 40)), cache, make_rows([1], [0], [40], DEVICE), weights)]
    for token in range(40, 110):
        rows = make_rows([1], [token], [1], DEVICE)
        found.append(decoding.decode(x.take(slice(token, token + 1)), cache, rows, weights))
    check((torch.cat(found), cache), (expected, wanted), [1], torch.bfloat16)
