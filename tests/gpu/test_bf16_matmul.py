# SPDX-License-Identifier: Apache-2.0
"""GEMMs by algorithms that are chosen by time, against those that PyTorch computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.gpu import autotuner
from blink.kernels.gpu.cublas_lt import LtMatmul, can_compute
from blink.kernels.gpu.gemm import bf16

pytestmark = pytest.mark.usefixtures("_nothing_is_chosen")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 4096, 1024), (67, 1000, 2056), (224, 4096, 4096), (512, 96, 14336)])
def test_every_algorithm_gives_the_product(dtype: torch.dtype, with_bias: bool, rows: int, n: int, k: int) -> None:
    torch.manual_seed(1)
    x, weight, bias = draw(rows, k, dtype=dtype), draw(n, k, dtype=dtype), draw(n, dtype=dtype) * 50
    product = LtMatmul(x, weight, bias if with_bias else None)
    expected = functional.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    algorithms = product.list_algorithms()
    assert algorithms
    for algorithm in algorithms:
        assert product.accepts(algorithm)
        found = product.compute(algorithm)
        assert found.dtype == dtype and error(found, expected) < 5e-3
        assert torch.equal(product.compute(algorithm), found)


def test_what_is_chosen_is_used_in_graphs_and_kept_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    path = tmp_path / "blink" / "products.json"
    x, weight = draw(224, 4096), draw(6144, 4096)
    name = bf16.name_matmul(x, weight)
    monkeypatch.setattr(autotuner, "_MIN_GAIN", -1.0)  # any algorithm is chosen, so that one is
    with autotuner.tuning(path):
        found = bf16.multiply(x, weight)
    assert error(found, functional.linear(x, weight)) < 5e-3
    chosen = autotuner._chosen[name]
    assert chosen is not None
    assert json.loads(path.read_text())[autotuner.name_machine()] == {name: chosen}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = bf16.multiply(x, weight)
    graph.replay()
    assert torch.equal(captured, LtMatmul(x, weight).compute(bytes.fromhex(chosen)))
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(autotuner, "_chosen", {})
    monkeypatch.setattr(autotuner, "_time", None)  # a start that measured anew would fail
    with autotuner.tuning(path):
        assert torch.equal(bf16.multiply(x, weight), captured)
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("code", ["ff" * 64, "00", "0g"])
def test_words_that_are_no_algorithm_are_chosen_anew(code: str, tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    x, weight = draw(100, 4096), draw(4096, 4096)
    name = bf16.name_matmul(x, weight)
    path.write_text(json.dumps({autotuner.name_machine(): {name: code}}))
    with autotuner.tuning(path):
        found = bf16.multiply(x, weight)
    assert error(found, functional.linear(x, weight)) < 5e-3
    assert json.loads(path.read_text())[autotuner.name_machine()][name] != code


def test_what_no_algorithm_is_made_for_is_left_to_pytorch(tmp_path: Path) -> None:
    weight = draw(4096, 4096)
    with autotuner.tuning(tmp_path / "products.json"):
        misaligned = draw(101, 4096).flatten()[1 : 1 + 100 * 4096].view(100, 4096)
        for x in (draw(100, 4096).float(), draw(4096, 100).T, misaligned):
            assert not can_compute(x)
            assert torch.equal(bf16.multiply(x, weight.to(x.dtype)), functional.linear(x, weight.to(x.dtype)))
    assert not autotuner._chosen
