# SPDX-License-Identifier: Apache-2.0
"""Hopper's attention of prompts against the plain reference: tiles, chunks of keys, shapes of heads, padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_attention import MIXED, Rows, check

from blink.kernels.gpu.attention import paged as attention
from blink.kernels.gpu.attention import plan as attention_plan
from blink.kernels.gpu.attention import prefill
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.operands import AttentionOptions

pytestmark = pytest.mark.skipif(not has_warpgroups(), reason="needs the warpgroup products of Hopper")

ONE_TILE: Rows = [(2, 2)]
FULL_TILE: Rows = [(32, 128)]
TWO_TILES: Rows = [(16, 200)]
LONG: Rows = [(1, 30), (300, 900), (5, 1000), (128, 128)]


@pytest.fixture(autouse=True)
def _kernel_of_prompts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let short prompts take the kernel too, and see that it ran: Triton's tiles would pass these tests as well."""
    attend = mock.Mock(wraps=prefill.attend_prompts)
    monkeypatch.setattr(attention_plan, "_PROMPT_PAIRS", 0)
    monkeypatch.setattr(attention, "attend_prompts", attend)
    yield
    attend.assert_called()


@pytest.mark.parametrize(
    "rows", [ONE_TILE, FULL_TILE, TWO_TILES, MIXED, LONG], ids=["one", "full", "two", "mixed", "long"]
)
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_prompts_equal_the_reference_for_each_block_size(rows: Rows, block_size: int) -> None:
    check(torch.device("cuda"), rows, heads=(8, 2), head_dim=128, block_size=block_size, dtype=torch.bfloat16)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1), (8, 1), (40, 10), (128, 1)])
def test_prompts_equal_the_reference_for_each_shape_of_heads(heads: tuple[int, int]) -> None:
    check(torch.device("cuda"), MIXED, heads=heads, head_dim=128, dtype=torch.bfloat16)


@pytest.mark.parametrize("padding", [(3, 3), (60, 5), (0, 4)])
def test_padding_of_prompts_gives_zeros(padding: tuple[int, int]) -> None:
    check(torch.device("cuda"), MIXED, heads=(8, 2), head_dim=128, dtype=torch.bfloat16, padding=padding)


@pytest.mark.parametrize("num_programs", [1, 16, 64, 1000])
def test_chunks_of_keys_are_combined(num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = dataclasses.replace(prefill.TILE, num_programs=num_programs, min_chunk=128)
    monkeypatch.setattr(prefill, "TILE", tile)
    check(torch.device("cuda"), LONG, heads=(8, 2), head_dim=128, dtype=torch.bfloat16)


def test_scores_are_scaled_as_the_model_says() -> None:
    check(
        torch.device("cuda"),
        LONG,
        heads=(8, 2),
        head_dim=128,
        dtype=torch.bfloat16,
        options=AttentionOptions(scale=0.3),
    )
