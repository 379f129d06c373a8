# SPDX-License-Identifier: Apache-2.0
"""The kernel of per-layer embeddings against the plain reference, with the table in either memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blink.kernels.cpu import layer_inputs as cpu
from blink.models.weights.token_table import let_gpu_read

gpu = pytest.importorskip("blink.kernels.gpu.layer_inputs")

VOCAB = 50
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make(tokens: int, layers: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what was projected, the table, ids and a norm's weight."""
    generator = torch.Generator().manual_seed(tokens)
    projected, table = (torch.randn(rows, layers * size, generator=generator).to(dtype) for rows in (tokens, VOCAB))
    ids = torch.randint(VOCAB, (tokens,), generator=generator, dtype=torch.int32)
    ids[0] = VOCAB - 1
    return projected, table, ids, (torch.rand(size, generator=generator) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "layers", "size"), [(1, 35, 256), (7, 3, 16), (33, 2, 48)])
def test_inputs_equal_the_reference(
    device: torch.device, tokens: int, layers: int, size: int, dtype: torch.dtype
) -> None:
    projected, table, ids, weight = make(tokens, layers, size, dtype)
    on_device = [part.to(device) for part in (projected, table, ids, weight)]
    for some in (range(layers), range(1, 2)):
        floats = projected.float(), table.float(), ids, weight.float()
        expected = cpu.join_inputs(*floats, some, scale=0.3, eps=1e-3)
        found = gpu.join_inputs(*on_device, some, scale=0.3, eps=1e-3)
        assert found.shape == (tokens, len(some), size)
        torch.testing.assert_close(found.cpu().float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_table_in_the_hosts_memory_is_read_by_captured_steps(device: torch.device) -> None:
    """Its rows are read when a graph runs, by the kernel: what is written there meanwhile is what is found."""
    if device.type == "cpu":
        pytest.skip("the interpreter captures no graphs")
    projected, table, ids, weight = make(9, 4, 64, torch.bfloat16)
    let_gpu_read(table)
    assert table.device.type == "cpu" and table.is_pinned()
    placed, places, norm = (part.to(device) for part in (projected, ids, weight))
    options = {"scale": 1.0, "eps": 1e-6}
    gpu.join_inputs(placed, table, places, norm, range(4), **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gpu.join_inputs(placed, table, places, norm, range(4), **options)
    for _ in range(3):
        places.random_(VOCAB)
        table.normal_()
        graph.replay()
        floats = projected.float(), table.float(), places.cpu(), weight.float()
        expected = cpu.join_inputs(*floats, range(4), **options)
        torch.testing.assert_close(found.cpu().float(), expected, rtol=2e-2, atol=2e-2)
