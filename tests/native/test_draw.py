# SPDX-License-Identifier: Apache-2.0
"""The draw of a cluster of thread blocks, as device code on the host's threads, against sorting and the CPU's noise."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import blink
from blink.kernels.cpu.philox import gumbel
from blink.region.layout import SAMPLING
from conftest import Compile

_SOURCES = Path(blink.__file__).parent / "csrc" / "gpu" / "decode"
_REPLACED = {
    # Each of the GPU's threads is one of the host's: fewer of them.
    "cluster_row.cuh": ("kRowCluster = 8", "kRowCluster = 2"),
    "truncation.cuh": None,
    "draw.cu": ("extern __shared__ __align__(16) char memory[];", "char* memory = block->shared();"),
}
VOCAB = 4096 + 24
Row = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Limits:
    """What may be drawn."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0


class Found(ctypes.Structure):
    """What the device code made of a row: the floor of what may be drawn, and what was drawn."""

    _fields_ = [("floor", ctypes.c_float), ("value", ctypes.c_float), ("token", ctypes.c_int32)]


Draw = Callable[..., Found]


@pytest.fixture(scope="module")
def draw(compile_native: Compile, tmp_path_factory: pytest.TempPathFactory) -> Draw:
    """Return draw(row, limits, step, changed): of bf16 as the model made them, or of floats made from them."""
    folder = tmp_path_factory.mktemp("sources")
    for name, pair in _REPLACED.items():
        text = (_SOURCES / name).read_text()
        assert pair is None or pair[0] in text
        (folder / name).write_text(text if pair is None else text.replace(*pair))
    (folder / "ptx.cuh").write_text('#include "gpu_threads.h"\n')
    flags = ("-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{folder}")
    run = ctypes.CDLL(str(compile_native("draw.cpp", *flags))).draw_row

    def draw_row(row: Row, limits: Limits, step: int = 7, changed: bool = False) -> Found:
        params = np.zeros((), SAMPLING)
        params["temperature"], params["top_p"] = limits.temperature, limits.top_p
        params["top_k"], params["min_p"] = limits.top_k, limits.min_p
        params["seed_low"], params["seed_high"] = 0xFEDCBA98, 5
        raw = torch.from_numpy(row).bfloat16().view(torch.int16).numpy()
        floats = np.pad(row / np.float32(limits.temperature), (0, 1000), constant_values=-np.inf) if changed else None
        found = Found()
        run(
            raw.ctypes.data_as(ctypes.c_void_p),
            len(row),
            None if floats is None else floats.ctypes.data_as(ctypes.c_void_p),
            len(row) + 1000,
            params.ctypes.data_as(ctypes.c_void_p),
            step,
            ctypes.byref(found),
        )
        return found

    return draw_row


def count_by_sorting(row: Row, limits: Limits) -> int:
    """Return how many logits may be drawn: ties all or none."""
    values = np.sort(row[np.isfinite(row)].astype(np.float64))[::-1] / np.float32(limits.temperature)
    if limits.min_p > 0:
        values = values[values >= values[0] + np.log(np.float32(limits.min_p))]
    if limits.top_k > 0:
        values = values[values >= values[min(limits.top_k, len(values)) - 1]]
    if limits.top_p < 1:
        masses = np.cumsum(np.exp(values - values[0]))
        values = values[values >= values[np.searchsorted(masses, limits.top_p * masses[-1])]]
    return len(values)


def make_row(kind: str, scale: float) -> Row:
    """Return logits that bfloat16 holds, of which the last are padding."""
    chance = np.random.default_rng(3)
    row = chance.normal(0, scale, VOCAB).astype(np.float32)
    if kind == "few levels":
        row = (np.floor(row * 2) / 2).astype(np.float32)
    elif kind == "equal":
        row[:] = np.float32(1.5)
    elif kind == "far":
        row[5] = np.float32(90)
    if kind != "whole":
        row[-300:] = -np.inf
    return torch.from_numpy(row).bfloat16().float().numpy()


LIMITS = [
    Limits(),
    Limits(top_k=1),
    Limits(top_k=40, temperature=0.3),
    Limits(top_p=0.9),
    Limits(top_p=0.01, temperature=1.7),
    Limits(top_k=50, top_p=0.8),
    Limits(top_k=700, top_p=0.95, min_p=0.001),
    Limits(min_p=0.05, temperature=0.7),
]
KINDS = [
    ("normal", 0.05), ("normal", 3.0), ("normal", 60.0), ("whole", 3.0), ("few levels", 2.0), ("equal", 1.0),
    ("far", 2.0),
]  # fmt: skip


@pytest.mark.parametrize("changed", [False, True], ids=["model", "changed"])
@pytest.mark.parametrize(("kind", "scale"), KINDS)
def test_the_floor_is_that_of_sorting_and_the_token_that_of_the_reference(
    draw: Draw, kind: str, scale: float, changed: bool
) -> None:
    row = make_row(kind, scale)
    for number, limits in enumerate(LIMITS):
        found = draw(row, limits, step=number, changed=changed)
        scaled = row / np.float32(limits.temperature)
        may_be_drawn = (scaled if changed else row) >= np.float32(found.floor)
        assert np.count_nonzero(may_be_drawn) == count_by_sorting(row, limits), limits
        tokens = torch.from_numpy(may_be_drawn.nonzero()[0])
        sums = torch.from_numpy(scaled)[tokens] + gumbel(tokens, (0xFEDCBA98, 5), number)
        assert found.token == tokens[sums.argmax()], limits
        assert found.value == pytest.approx(float(sums.max()), abs=1e-4, rel=1e-5)


def test_more_than_all_logits_and_nearly_all_of_the_mass(draw: Draw) -> None:
    row = make_row("normal", 3.0)
    assert np.count_nonzero(row >= draw(row, Limits(top_k=100_000)).floor) == np.isfinite(row).sum()
    limits = Limits(top_p=0.9999)
    found = np.count_nonzero(row >= draw(row, limits).floor)
    masses = np.cumsum(np.exp(np.sort(row.astype(np.float64))[::-1]))
    missed = masses[[found - 1, count_by_sorting(row, limits) - 1]] / masses[-1]
    assert abs(missed[0] - missed[1]) < 4e-6


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_nothing_is_drawn_from_a_row_without_a_finite_largest_logit(draw: Draw, broken: float) -> None:
    row = make_row("normal", 1.0)
    row[9] = broken
    for changed in (False, True):
        assert draw(row, Limits(top_k=40), changed=changed).value == pytest.approx(broken, nan_ok=True)
    row[:] = -np.inf
    assert draw(row, Limits(top_p=0.5)).value == -np.inf
