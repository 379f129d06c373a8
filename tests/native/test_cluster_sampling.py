# SPDX-License-Identifier: Apache-2.0
"""Sampling by clusters, as device code on the host's threads, against sorting and the CPU's noise."""

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
from blink.region.layout import SAMPLING
from blink.sampling_params import MAX_LOGPROBS
from conftest import Compile
from sampling_noise import gumbel

_SOURCES = Path(blink.__file__).parent / "csrc" / "gpu" / "decode"
_REPLACED = {
    # Each of the GPU's threads is one of the host's: fewer of them.
    "cluster_row.cuh": ("kRowCluster = 8", "kRowCluster = 2"),
    "sample.cu": ("extern __shared__ __align__(16) char memory[];", "char* memory = block->shared();"),
}
VOCAB = 4096 + 24
Row = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Limits:
    """What may be drawn, and how many logprobs are asked for."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    num_logprobs: int = -1


class Found(ctypes.Structure):
    """What the device code made of a row: the floor of what may be drawn, what was drawn, and logprobs."""

    _fields_ = [
        ("floor", ctypes.c_float),
        ("value", ctypes.c_float),
        ("token", ctypes.c_int32),
        ("largest", ctypes.c_float),
        ("mass", ctypes.c_float),
        ("top_tokens", ctypes.c_int32 * MAX_LOGPROBS),
        ("top_logprobs", ctypes.c_float * MAX_LOGPROBS),
    ]


Sample = Callable[..., Found]


@pytest.fixture(scope="module")
def sample(compile_native: Compile, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Return sample(row, limits, step, changed): of bf16 as the model made them, or of floats made from them."""
    folder = tmp_path_factory.mktemp("sources")
    for name, (old, new) in _REPLACED.items():
        text = (_SOURCES / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
    (folder / "ptx.cuh").write_text('#include "gpu_threads.h"\n')
    flags = ("-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{folder}")
    run = ctypes.CDLL(str(compile_native("cluster_sampling.cpp", *flags))).sample_row

    def sample_row(row: Row, limits: Limits, step: int = 7, changed: bool = False) -> Found:
        params = np.zeros((), SAMPLING)
        params["temperature"], params["top_p"] = limits.temperature, limits.top_p
        params["top_k"], params["min_p"] = limits.top_k, limits.min_p
        params["num_logprobs"] = limits.num_logprobs
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

    return sample_row


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
    sample: Sample, kind: str, scale: float, changed: bool
) -> None:
    row = make_row(kind, scale)
    for number, limits in enumerate(LIMITS):
        found = sample(row, limits, step=number, changed=changed)
        scaled = row / np.float32(limits.temperature)
        may_be_drawn = (scaled if changed else row) >= np.float32(found.floor)
        assert np.count_nonzero(may_be_drawn) == count_by_sorting(row, limits), limits
        tokens = torch.from_numpy(may_be_drawn.nonzero()[0])
        sums = torch.from_numpy(scaled)[tokens] + gumbel(tokens, (0xFEDCBA98, 5), number)
        assert found.token == tokens[sums.argmax()], limits
        assert found.value == pytest.approx(float(sums.max()), abs=1e-4, rel=1e-5)


def test_more_than_all_logits_and_nearly_all_of_the_mass(sample: Sample) -> None:
    row = make_row("normal", 3.0)
    assert np.count_nonzero(row >= sample(row, Limits(top_k=100_000)).floor) == np.isfinite(row).sum()
    limits = Limits(top_p=0.9999)
    found = np.count_nonzero(row >= sample(row, limits).floor)
    masses = np.cumsum(np.exp(np.sort(row.astype(np.float64))[::-1]))
    missed = masses[[found - 1, count_by_sorting(row, limits) - 1]] / masses[-1]
    assert abs(missed[0] - missed[1]) < 4e-6


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_nothing_is_drawn_from_a_row_without_a_finite_largest_logit(sample: Sample, broken: float) -> None:
    row = make_row("normal", 1.0)
    row[9] = broken
    for changed in (False, True):
        assert sample(row, Limits(top_k=40), changed=changed).value == pytest.approx(broken, nan_ok=True)
    row[:] = -np.inf
    assert sample(row, Limits(top_p=0.5)).value == -np.inf


@pytest.mark.parametrize(("kind", "scale"), KINDS)
@pytest.mark.parametrize("count", [0, 1, 20])
def test_the_best_logprobs_are_those_of_sorting_with_the_lowest_of_equal_tokens(
    sample: Sample, kind: str, scale: float, count: int
) -> None:
    row = make_row(kind, scale)
    found = sample(row, Limits(temperature=0.0, num_logprobs=count))
    best = np.argsort(-row, kind="stable")[:count]
    log_mass = torch.from_numpy(row).double().logsumexp(0).item()
    assert np.log(found.mass) + found.largest == pytest.approx(log_mass, abs=1e-4)
    assert found.top_tokens[:count] == best.tolist()
    assert found.top_logprobs[:count] == pytest.approx((row[best] - log_mass).tolist(), abs=1e-4)


def test_logits_that_are_not_finite_come_last(sample: Sample) -> None:
    row = np.full(VOCAB, -np.inf, np.float32)
    row[[9, 4, 2000]] = 1.0, 2.0, 1.0
    found = sample(row, Limits(temperature=0.0, num_logprobs=5))
    assert found.top_tokens[:5] == [4, 9, 2000, 0, 1]
    assert found.top_logprobs[2:5] == pytest.approx([1 - np.log(np.exp(2) + 2 * np.e), -np.inf, -np.inf])
