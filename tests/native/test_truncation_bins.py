# SPDX-License-Identifier: Apache-2.0
"""The search for thresholds by histograms, as device code on the host's threads, against sorted float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blink
from conftest import Compile

_SOURCES = Path(blink.__file__).parent / "csrc" / "gpu" / "decode"
_SIZES = "kTruncationThreads = 256, kTruncationCluster = 8"
_FEWER = "kTruncationThreads = 64, kTruncationCluster = 2"
_MEMORY = "extern __shared__ __align__(16) char memory[];"
PART = 1024
Row = np.ndarray[Any, np.dtype[np.float32]]
Search = Callable[[Row, int, float, float], float]


@pytest.fixture(scope="module")
def search(compile_native: Compile, tmp_path_factory: pytest.TempPathFactory) -> Search:
    """Return search(row, top_k, top_p, min_p): the threshold that the device code finds."""
    folder = tmp_path_factory.mktemp("sources")
    # Each of the GPU's threads is one of the host's: fewer of them.
    for name, found, replaced in (
        ("truncation.cuh", _SIZES, _FEWER),
        ("truncation_bins.cu", _MEMORY, "char* memory = block->shared();"),
    ):
        text = (_SOURCES / name).read_text()
        assert found in text
        (folder / name).write_text(text.replace(found, replaced))
    (folder / "ptx.cuh").write_text('#include "gpu_threads.h"\n')
    flags = ("-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{folder}")
    find = ctypes.CDLL(str(compile_native("truncation_bins.cpp", *flags))).find_threshold
    floats = np.ctypeslib.ndpointer(np.float32, flags="C")
    find.restype = ctypes.c_float
    find.argtypes = [floats, ctypes.c_uint32, floats, floats, ctypes.c_uint32, ctypes.c_int, *[ctypes.c_float] * 2]

    def run(row: Row, top_k: int, top_p: float, min_p: float) -> float:
        parts = row.reshape(-1, PART)
        lowest = np.where(np.isinf(parts), np.inf, parts).min(1).astype(np.float32)
        return find(row, len(row), parts.max(1), lowest, len(parts), top_k, top_p, min_p)

    return run


def count_by_sorting(row: Row, top_k: int, top_p: float, min_p: float) -> int:
    """Return how many logits may be sampled: ties all or none."""
    values = np.sort(row[np.isfinite(row)].astype(np.float64))[::-1]
    if min_p > 0:
        values = values[values >= np.float32(values[0] + np.log(np.float32(min_p)))]
    if top_k > 0:
        values = values[values >= values[min(top_k, len(values)) - 1]]
    if top_p < 1:
        masses = np.cumsum(np.exp(values - values[0]))
        values = values[values >= values[np.searchsorted(masses, top_p * masses[-1])]]
    return len(values)


def make_row(kind: str, scale: float) -> Row:
    """Return four parts of logits, of which the last is mostly padding."""
    chance = np.random.default_rng(3)
    row = chance.normal(0, scale, 4 * PART).astype(np.float32)
    if kind == "few levels":
        row = (np.floor(row * 2) / 2).astype(np.float32)
    elif kind == "equal":
        row[:] = np.float32(1.5)
    elif kind == "far":
        row[5] = np.float32(90)
    row[-PART + 7 :] = -np.inf
    return row


LIMITS = [(1, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.01, 0.0), (50, 0.8, 0.0), (700, 0.95, 0.001)]


@pytest.mark.parametrize(
    ("kind", "scale"),
    [("normal", 0.05), ("normal", 3.0), ("normal", 60.0), ("few levels", 2.0), ("equal", 1.0), ("far", 2.0)],
)
def test_as_many_logits_may_be_sampled_as_by_sorting(search: Search, kind: str, scale: float) -> None:
    row = make_row(kind, scale)
    for limits in LIMITS:
        assert np.count_nonzero(row >= search(row, *limits)) == count_by_sorting(row, *limits), limits


def test_more_than_all_logits_and_nearly_all_of_the_mass(search: Search) -> None:
    row = make_row("normal", 3.0)
    assert np.count_nonzero(row >= search(row, 100_000, 1.0, 0.0)) == np.isfinite(row).sum()
    found = np.count_nonzero(row >= search(row, 0, 0.9999, 0.0))
    assert abs(found - count_by_sorting(row, 0, 0.9999, 0.0)) <= 2, "the mass is met to a few millionths"


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_row_without_a_finite_largest_logit_has_no_threshold(search: Search, broken: float) -> None:
    row = make_row("normal", 1.0)
    row[9] = broken
    parts = row.reshape(-1, PART).max(1)
    assert not np.isfinite(parts).all()
    assert np.isnan(search(row, 40, 1.0, 0.0))
