# SPDX-License-Identifier: Apache-2.0
"""The rotary kernel against the plain reference, over shapes of heads, partial rotation and head norms."""

from __future__ import annotations

import pytest
import torch

from blink.formats.fp8 import FP8
from blink.kernels.cpu.rotary import rotate_and_store_torch
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import HeadNorm, KvScales
from blink.kernels.rotary import make_rotary_table, rotate_and_store
from blink.models.rope import Rope

gpu_rotary = pytest.importorskip("blink.kernels.gpu.rotary")

BLOCK_SIZE, NUM_BLOCKS = 16, 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(9, 3, 64, 64), (32, 8, 128, 128), (10, 1, 128, 96), (4, 4, 96, 96), (16, 12, 16, 8)],
)
def test_queries_and_cache_equal_the_reference(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, with_norm: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    kv_slots = torch.tensor([17, 3, -1, 79, 0, -1], dtype=torch.int32)
    qkv = torch.randn(len(kv_slots), (heads + 2 * kv_heads) * head_dim).to(dtype)
    table = make_rotary_table(Rope(theta=1e4, rotary_dim=rotary_dim).frequencies(), 4096, "cpu")
    rotation = table[torch.tensor([0, 1, 0, 63, 4000, 0])]
    weights = torch.rand(2, head_dim).to(dtype) + 0.5
    norm = HeadNorm(weights[0], weights[1], 1e-6) if with_norm else None
    on_device = HeadNorm(weights[0].to(device), weights[1].to(device), 1e-6) if with_norm else None
    cache = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim), 7.0, dtype=dtype)
    found_cache = cache.to(device, copy=True)
    found = gpu_rotary.rotate_and_store(
        qkv.to(device), rotation.to(device), kv_slots.to(device), LayerCache(found_cache), on_device
    )
    expected = rotate_and_store_torch(qkv.clone(), rotation, kv_slots, LayerCache(cache), norm)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found_cache.cpu(), cache, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (9, 96), (2, 512)])
def test_heads_of_values_are_normalised(device: torch.device, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    kv_slots = torch.tensor([17, -1, 79], dtype=torch.int32)
    qkv = torch.randn(3, (4 + 2 * kv_heads) * head_dim).to(dtype)
    rotation = make_rotary_table(Rope(theta=1e4, rotary_dim=head_dim).frequencies(), 64, "cpu")[[0, 1, 63]]
    caches = [torch.full((2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)]
    on_device = caches[0].to(device, copy=True)
    found = gpu_rotary.rotate_and_store(
        qkv.to(device), rotation.to(device), kv_slots.to(device), LayerCache(on_device), value_eps=1e-3
    )
    expected = rotate_and_store(qkv.clone(), rotation, kv_slots, LayerCache(caches[1]), value_eps=1e-3)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(on_device.cpu(), caches[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_norm", [False, True])
def test_queries_alone_are_rotated_and_nothing_is_written(device: torch.device, with_norm: bool) -> None:
    torch.manual_seed(4)
    kv_slots = torch.tensor([17, 3, 79], dtype=torch.int32)
    query, weight = torch.randn(3, 9 * 64), torch.rand(64) + 0.5
    rotation = make_rotary_table(Rope(theta=1e4, rotary_dim=64).frequencies(), 64, "cpu")[[0, 1, 63]]
    cells = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, 2, 64), 7.0)
    norms = [HeadNorm(weight.to(place), weight.to(place), 1e-6) if with_norm else None for place in (device, "cpu")]
    on_device = LayerCache(cells.to(device, copy=True))
    found = gpu_rotary.rotate_and_store(
        query.to(device), rotation.to(device), kv_slots.to(device), on_device, norms[0], has_keys=False
    )
    expected = rotate_and_store(query.clone(), rotation, kv_slots, LayerCache(cells), norms[1], has_keys=False)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(on_device.cells.cpu(), torch.full_like(cells, 7.0)) and torch.equal(cells, on_device.cells.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary_dim"), [(9, 3, 64, 64), (10, 1, 128, 96)])
def test_a_cache_in_fp8_equals_the_reference(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, with_norm: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    kv_slots = torch.tensor([17, 3, -1, 79], dtype=torch.int32)
    qkv = torch.randn(len(kv_slots), (heads + 2 * kv_heads) * head_dim).to(dtype)
    qkv[0] *= 1000  # beyond FP8, whose largest number it becomes
    positions = [0, 1, 0, 63]
    if device.type == "cpu":
        if with_norm:
            pytest.skip("Triton's interpreter rounds to FP8 wrongly")
        qkv, positions = qkv.to(FP8).to(dtype).mul_(4), [0, 0, 0, 0]  # what needs no rounding
    rotation = make_rotary_table(Rope(theta=1e4, rotary_dim=rotary_dim).frequencies(), 64, "cpu")[positions]
    weights = torch.rand(2, head_dim).to(dtype) + 0.5
    norm = HeadNorm(weights[0], weights[1], 1e-6) if with_norm else None
    on_device = HeadNorm(weights[0].to(device), weights[1].to(device), 1e-6) if with_norm else None
    scales = KvScales(0.5, 2.0)
    cache = torch.ones(2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim).to(FP8)
    found_cache = cache.to(device, copy=True)
    found = gpu_rotary.rotate_and_store(
        qkv.to(device), rotation.to(device), kv_slots.to(device), LayerCache(found_cache), on_device, scales
    )
    expected = rotate_and_store_torch(qkv.clone(), rotation, kv_slots, LayerCache(cache), norm, scales)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
    found_cells, cells = found_cache.cpu().float(), cache.float()
    assert cells.abs().max() == torch.finfo(FP8).max
    # What was nearly between two numbers of FP8 may be rounded to the other.
    assert (found_cells != cells).float().mean() < (0.001 if dtype == torch.float32 else 0.01)
    torch.testing.assert_close(found_cells, cells, rtol=0.13, atol=2**-8)
