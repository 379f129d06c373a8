# SPDX-License-Identifier: Apache-2.0
"""Experts in GGUF's formats on a GPU: GEMMs of each format and tile against the gguf package's values."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import gguf
import pytest
import torch
from torch import Tensor

from blink.formats.gguf import GgufRows
from blink.formats.gguf_experts import GgufExperts, pack_experts, stack_experts
from blink.formats.int4_arrays import pack_small_groups
from blink.kernels.cpu import moe as cpu_moe
from gguf_blocks import GPU_KINDS, Kind, dequantize, quantize
from triton_interpreter import IS_INTERPRETED, large

pytest.importorskip("triton")
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from blink.kernels.gpu.moe import grouped as gpu_moe
from blink.kernels.gpu.moe import grouped_gguf
from blink.kernels.gpu.moe.grouped_gguf import GgufExpertTiling, multiply_gguf_experts
from test_gguf_matmul import draw_int4

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if IS_INTERPRETED else 1e-2
kinds = pytest.mark.parametrize("kind", GPU_KINDS, ids=lambda kind: kind.name)


def make_experts(kinds: Sequence[Kind], count: int, rows: int, columns: int) -> tuple[GgufExperts, Tensor]:
    """Return matrices of a part for each of the kinds, so many rows each, and their values."""
    draws = torch.Generator().manual_seed(len(kinds))
    experts: list[list[GgufRows]] = []
    values: list[Tensor] = []
    for _ in range(count):
        parts = [quantize((torch.randn(rows, columns, generator=draws) * 0.05).numpy(), kind) for kind in kinds]
        experts.append([GgufRows(int(kind), torch.from_numpy(part)) for kind, part in zip(kinds, parts, strict=True)])
        values.append(torch.cat([dequantize(part, kind) for kind, part in zip(kinds, parts, strict=True)]))
    shape = (count, rows * len(kinds), columns)
    found = pack_experts(experts, shape, functools.partial(torch.empty, device=DEVICE), DEVICE)
    return found, torch.stack(values).to(DEVICE)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def check(gate: Kind, up: Kind, down: Kind, rows: int, top_k: int, shape: tuple[int, int, int]) -> None:
    """Compare with float32 on the dequantised experts; padding's rows become zero."""
    count, hidden, size = shape
    torch.manual_seed(1)
    gate_up, gate_up_values = make_experts([gate, up], count, size, hidden)
    downs, down_values = make_experts([down], count, hidden, size)
    x = torch.randn(rows, hidden, device=DEVICE).to(DTYPE)
    logits = torch.randn(rows, count, device=DEVICE).to(DTYPE)
    expected = cpu_moe.moe(
        x.float(), logits.float(), gate_up_values, down_values, top_k=top_k, renormalize=True
    )  # fmt: skip
    padded = torch.cat([x, torch.full((2, hidden), torch.nan, device=DEVICE, dtype=DTYPE)])
    found = gpu_moe.moe(
        padded,
        torch.cat([logits, logits[:1].expand(2, -1)]),
        gate_up,
        downs,
        torch.tensor([rows], dtype=torch.int32, device=DEVICE),
        top_k=top_k,
        renormalize=True,
    )
    assert error(found[:rows], expected) < LIMIT
    assert not found[rows:].any()


@kinds
@pytest.mark.parametrize(
    ("rows", "top_k"), [(1, 2), *(pytest.param(*case, marks=large) for case in ((3, 2), (17, 5), (64, 8), (300, 3)))]
)
def test_products_equal_those_of_the_dequantised_experts(kind: Kind, rows: int, top_k: int) -> None:
    width = max(64, gguf.GGML_QUANT_SIZES[kind][0])
    check(kind, kind, kind, rows, top_k, (4, width, width) if IS_INTERPRETED else (16, 768, 512))


@pytest.mark.parametrize(
    ("gate", "up", "down"),
    [(Kind.Q4_K, Kind.Q6_K, Kind.Q8_0), (Kind.Q6_K, Kind.Q4_K, Kind.Q4_1), (Kind.Q8_0, Kind.Q5_K, Kind.Q6_K)],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize("most", [0, 32], ids=["tiles", "rows"])
def test_gates_ups_and_downs_may_have_different_formats(
    gate: Kind, up: Kind, down: Kind, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_gguf, "_MAX_GEMV_PAIRS", most)
    check(gate, up, down, 2, 1, (2, 256, 256))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_a_row_may_end_in_the_middle_of_a_unit(kind: Kind) -> None:
    check(kind, kind, kind, 3, 2, (4, 96, 160))


@pytest.mark.parametrize(
    "tiling",
    [
        GgufExpertTiling(16, 16, 4, 1, 2),
        GgufExpertTiling(32, 32, 2, 4, 3),
        *(pytest.param(GgufExpertTiling(*sizes), marks=large) for sizes in ((64, 64, 1, 4, 2), (128, 64, 1, 8, 3))),
    ],
    ids=str,
)
@kinds
def test_any_tile_gives_the_product(kind: Kind, tiling: GgufExpertTiling) -> None:
    """Of experts with no rows, with one and with more than a tile has."""
    torch.manual_seed(2)
    experts, values = make_experts([kind], 4, 64, 512)
    rows = 40
    x = torch.randn(rows, 512, device=DEVICE).to(DTYPE)
    chosen = torch.tensor([1] + [2] * (rows - 1), device=DEVICE)
    logits = torch.nn.functional.one_hot(chosen, 4).to(DTYPE)
    routes = gpu_moe.route(logits, torch.tensor([rows], dtype=torch.int32, device=DEVICE), 1)
    found = torch.empty(rows, 64, device=DEVICE, dtype=DTYPE)
    multiply_gguf_experts(x, experts, routes, found, pairs_per_row=1, activation=None, tiling=tiling)
    expected = torch.einsum("rk,rnk->rn", x.double(), values.to(DTYPE).double()[chosen])
    assert error(found, expected) < LIMIT


def test_experts_may_be_multiplied_by_factors() -> None:
    """Of formats with one scale of a group, and with a scale of its groups' scales."""
    torch.manual_seed(3)
    factors = torch.tensor([2.0, 4.0], device=DEVICE)
    for kind in (Kind.Q8_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K):
        experts, values = make_experts([kind], 2, 16, 256)
        experts.multiply(factors)
        x, chosen = torch.randn(2, 256, device=DEVICE).to(DTYPE), torch.tensor([0, 1], device=DEVICE)
        logits = torch.nn.functional.one_hot(chosen, 2).to(DTYPE)
        routes = gpu_moe.route(logits, torch.tensor([2], dtype=torch.int32, device=DEVICE), 1)
        found = torch.empty(2, 16, device=DEVICE, dtype=DTYPE)
        multiply_gguf_experts(x, experts, routes, found, pairs_per_row=1, activation=None)
        assert error(found, torch.einsum("rk,rnk->rn", x.double(), values.double() * factors[:, None, None])) < LIMIT


def test_experts_of_small_groups_stay_4_bits() -> None:
    """As a loader stacks them, expert by expert."""
    shape, matrices = (3, 2 * 32, 128), [[draw_int4(32, 128, 32) for _ in range(2)] for _ in range(3)]
    arrays = ([pack_small_groups(part) for part in parts] for parts in matrices)
    experts = stack_experts(arrays, shape, functools.partial(torch.empty, device=DEVICE))
    values = torch.stack([torch.cat([part.dequantize(torch.float32) for part in parts]) for parts in matrices])
    assert experts.nbytes == values.numel() * 5 / 8
    down, down_values = make_experts([Kind.Q8_0], 3, 128, 32)
    x, logits = torch.randn(4, 128, device=DEVICE).to(DTYPE), torch.randn(4, 3, device=DEVICE).to(DTYPE)
    count = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    found = gpu_moe.moe(x, logits, experts, down, count, top_k=2, renormalize=True)
    expected = cpu_moe.moe(x.float(), logits.float(), values, down_values, top_k=2, renormalize=True)
    assert error(found, expected) < max(LIMIT, 2e-3)


def test_experts_take_the_bytes_of_their_arrays() -> None:
    """Of 4 bits and the scales of Q4_K: 148 bytes for 256 numbers."""
    experts, _ = make_experts([Kind.Q4_K, Kind.Q6_K], 3, 16, 512)
    assert experts.nbytes == 3 * 16 * 2 * (148 + 212)
