# SPDX-License-Identifier: Apache-2.0
"""GEMMs of few rows by the kernel that is the fastest: which are compared, which one computes, and what is refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("needs triton: pip offers it for Linux on x86-64 and arm64", allow_module_level=True)

from blink.formats.layouts import Layout, Matrix
from blink.formats.schemes import BF16
from blink.kernels.cpu import activation as cpu
from blink.kernels.gpu import autotuner
from blink.kernels.gpu.gemm import measured
from blink.kernels.gpu.gemm.measured import MAX_ROWS, measure, measure_gated
from blink.kernels.matmul import GatedMatmul, Matmul, take_all

N, K = 1024, 512
WEIGHT, X = torch.ones(N, K, dtype=torch.bfloat16), torch.ones(2, K, dtype=torch.bfloat16)


def refuse_many(matrix: Matrix, rows: int) -> str | None:  # noqa: ARG001
    return "more than 2 rows" if rows > 2 else None


def make(name: str, value: float, refuses: Any = take_all) -> Matmul:
    """Make a kernel whose results tell that it ran."""
    return Matmul(name, refuses, lambda x, *_: x.new_full((len(x), N), value))


FIRST, NARROW, WIDE = make("first", 1), make("narrow", 2, refuse_many), make("wide", 3)
MEASURED = measure(FIRST, (NARROW, WIDE))


@pytest.fixture(autouse=True)
def _nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_chosen", "_kept"):
        monkeypatch.setattr(autotuner, name, {})
    monkeypatch.setattr(autotuner, "name_machine", lambda: "this one")
    monkeypatch.setattr(autotuner, "_is_only_noted", lambda: False)


def multiply_tuned(times: list[float], x: Tensor, path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return which kernel computes when the candidates take these times."""
    monkeypatch.setattr(autotuner, "_time", lambda candidates: times[: len(candidates)])
    with autotuner.tuning(path / "products.json"):
        MEASURED.multiply(x, WEIGHT, None)
    return float(MEASURED.multiply(x, WEIGHT, None)[0, 0])


def test_the_first_computes_what_was_not_measured() -> None:
    assert float(MEASURED.multiply(X, WEIGHT, None)[0, 0]) == 1


@pytest.mark.parametrize(("times", "found"), [([1, 2, 3], 1), ([2, 1, 3], 2), ([3, 2, 1], 3), ([1, 0.99, 0.98], 1)])
def test_the_fastest_computes_once_it_is_measured(
    times: list[float], found: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert multiply_tuned(times, X, tmp_path, monkeypatch) == found


def test_a_kernel_that_refuses_is_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiply_tuned([2, 1], X[:1].expand(3, -1).contiguous(), tmp_path, monkeypatch) == 3


def test_each_number_of_rows_is_measured_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiply_tuned([2, 1, 3], X, tmp_path, monkeypatch) == 2
    assert multiply_tuned([1, 2, 3], X[:1], tmp_path, monkeypatch) == 1
    assert float(MEASURED.multiply(X, WEIGHT, None)[0, 0]) == 2


def test_every_candidate_is_launched_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def note(name: str) -> Matmul:
        return Matmul(name, take_all, lambda x, *_: launched.append(name) or x)

    monkeypatch.setattr(autotuner, "is_compiling_ahead", lambda: True)
    measure(note("first"), (note("other"),)).multiply(X, WEIGHT, None)
    assert {"first", "other"} == set(launched)


@pytest.mark.parametrize(
    ("n", "rows", "others", "reason"),
    [
        (N, 2, (NARROW,), None),
        (N, 3, (NARROW,), "more than 2 rows"),
        (N, MAX_ROWS, (NARROW, WIDE), None),
        (N, MAX_ROWS + 1, (WIDE,), f"more than {MAX_ROWS} rows"),
        (8, 1, (WIDE,), f"fewer than {measured.MIN_WEIGHTS} weights"),
    ],
)
def test_it_takes_what_another_than_the_first_takes(
    n: int, rows: int, others: tuple[Matmul, ...], reason: str | None
) -> None:
    assert measure(FIRST, others).refuses(Matrix(n, K, Layout.ROWS, BF16), rows) == reason
    assert measure(make("first", 1, lambda *_: "not that"), others).refuses(Matrix(N, K, Layout.ROWS, BF16), 1)


def test_the_plan_names_who_is_compared() -> None:
    matrix = Matrix(N, K, Layout.ROWS, BF16)
    assert MEASURED.describe(matrix, 2) == "(narrow, wide), as measured at boot"
    assert MEASURED.describe(matrix, 3) == "(wide), as measured at boot"


def test_gates_of_the_first_have_their_activation_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "activate", cpu.activate)
    gated = measure_gated(FIRST, (GatedMatmul("gated", take_all, lambda x, _: x.new_full((len(x), N // 2), 7)),))
    silu = float(torch.nn.functional.silu(torch.tensor(1.0)))
    assert float(gated.multiply(X, WEIGHT)[0, 0]) == pytest.approx(silu, rel=0.01)
    monkeypatch.setattr(autotuner, "_time", lambda _: [2, 1])
    with autotuner.tuning(tmp_path / "products.json"):
        assert gated.multiply(X, WEIGHT).shape == (2, N // 2)
    assert float(gated.multiply(X, WEIGHT)[0, 0]) == 7
