# SPDX-License-Identifier: Apache-2.0
"""Sampling on a GPU, as device code on the host's threads: by a cluster and by a block, against the oracle."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import blink
from blink.kernels.batch import Batch, Header, Param
from blink.kernels.cpu.constraint import list_allowed
from conftest import Compile
from constrained_batch import automaton_of, make_constrained, make_vocabulary
from model_driver import set_params
from sampling_oracle import sample as sample_plainly
from sampling_rows import check_rows, make_rows

gpu_sampling = pytest.importorskip("blink.kernels.gpu.sampling")
gpu_constraint = pytest.importorskip("blink.kernels.gpu.constraint")

_SOURCES = Path(blink.__file__).parent / "csrc" / "kernels"
_CLUSTER = 2  # each of the GPU's threads is one of the host's: fewer of them
_REPLACED = {
    "sampler/row_group.cuh": ("kRowCluster = 8", f"kRowCluster = {_CLUSTER}"),
    "sampler/sample.cu": ("extern __shared__ __align__(16) char memory[];", "char* memory = block->shared();"),
}
_TYPES = {torch.bfloat16: b"b", torch.float16: b"h", torch.float32: b"f"}
VOCAB = 4096 + 24
Row = np.ndarray[Any, np.dtype[np.float32]]


class Device:
    """The device code on the host, started by the GPU's own launcher."""

    def __init__(self, library: ctypes.CDLL, group: Any) -> None:
        """Take the library, and who samples a row."""
        self._library, self._is_cluster = library, group is gpu_sampling.Group.CLUSTER
        self._group = group
        library.sample_on_host.argtypes = [ctypes.c_char_p, ctypes.c_bool, ctypes.c_char, ctypes.c_uint32]
        library.find_floor_on_host.argtypes = [ctypes.c_char_p, ctypes.c_bool]
        library.find_floor_on_host.restype = ctypes.c_float

    def sample(self, logits: Tensor, batch: Batch) -> None:
        """Sample a batch's rows."""
        self._launch(
            logits,
            batch,
            lambda arguments, type_of_logits: self._library.sample_on_host(
                arguments, self._is_cluster, type_of_logits, logits.shape[0]
            ),
        )

    def find_floor(self, logits: Tensor, batch: Batch) -> float:
        """Return the least logit of a row that may be drawn."""
        return self._launch(
            logits,
            batch,
            lambda arguments, _: self._library.find_floor_on_host(arguments, self._is_cluster),
        )

    def _launch(self, logits: Tensor, batch: Batch, run: Callable[[bytes, bytes], Any]) -> Any:
        results: list[Any] = []

        def launch(*given: Any, **_: object) -> None:
            arguments: bytes = given[3]
            results.append(run(arguments, _TYPES[logits.dtype]))

        with (
            patch.object(gpu_sampling, "_CLUSTER", _CLUSTER),
            patch.object(gpu_sampling, "launch", launch),
            patch.object(gpu_sampling, "compile_kernel", lambda *_: None),
            patch.object(gpu_sampling, "has_clusters", lambda: True),
            patch.object(gpu_sampling, "describe_kernel", lambda *_, **__: (0, "")),
            patch.object(gpu_sampling, "find_allowed", find_allowed_on_host),
        ):
            gpu_sampling.sample(logits, batch, logits.shape[0], self._group)
        return results[0]


def find_allowed_on_host(batch: Batch, num_rows: int, _: int) -> Any:
    """Return what the kernels of gpu/constraint.py find."""
    bits = batch.token_bitmasks.view(batch.token_bitmasks.shape[0] * 2, -1)
    lists, may_end = torch.full((num_rows,), -1, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.int32)
    for row in range(int(batch.header[Header.NUM_ROWS])):
        slot = int(batch.row_slots[row])
        if int(batch.params[slot, Param.AUTOMATON]) > 0:
            found, may_end[row] = list_allowed(batch, slot, int(batch.context_lens[row]))
            if found is not None:
                lists[row] = (found.data_ptr() - bits.data_ptr()) // (4 * bits.shape[1])
    return gpu_constraint.Allowed(bits, lists, may_end)


@pytest.fixture(scope="module")
def library(compile_native: Compile, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the device code, compiled for the host."""
    folder = tmp_path_factory.mktemp("sources")
    for name, (old, new) in _REPLACED.items():
        text = (_SOURCES / name).read_text()
        assert old in text
        path = folder / "kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(old, new))
    (folder / "kernels" / "common").mkdir()
    (folder / "kernels" / "common" / "ptx.cuh").write_text('#pragma once\n#include "gpu_threads.h"\n')
    flags = ("-O0", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-iquote{folder}")
    return ctypes.CDLL(str(compile_native("device_sampling.cpp", *flags)))


@pytest.fixture(params=list(gpu_sampling.Group), ids=lambda group: group.name.lower())
def device(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Device:
    """Return the device code by each group."""
    return Device(library, request.param)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str
)
def test_random_rows_give_the_oracles_tokens_and_logprobs(device: Device, dtype: torch.dtype) -> None:
    for seed in {torch.float32: (1, 1037), torch.bfloat16: (0, 2), torch.float16: (4,)}[dtype]:
        check_rows(device.sample, seed, dtype, count=6, is_exact=False)


@pytest.mark.long
@pytest.mark.parametrize("dtype", _TYPES, ids=str)
def test_thousands_of_random_rows(device: Device, dtype: torch.dtype) -> None:
    for seed in range(3000, 3060):
        if dtype != torch.bfloat16 or make_rows(seed)[0].shape[1] % 4 == 0:  # each way of reading is compiled once
            check_rows(device.sample, seed, dtype, is_exact=False)


def test_constrained_rows_take_what_their_automata_allow(device: Device) -> None:
    vocabulary = make_vocabulary(603)
    kinds = [automaton_of(json_object=True), automaton_of(regex="[a-c]{2,5}"), None, automaton_of(choice=["yes", "no"])]
    texts = [b'{"a": [', b"ab", b"free", b"yes"]
    tokens = [[vocabulary.index(bytes([byte])) for byte in text] for text in texts]
    batch, expected = (make_constrained(vocabulary, kinds, tokens) for _ in range(2))
    for each in (batch, expected):
        for row, slot in enumerate(each.row_slots.tolist()):
            each.params_f32[slot, Param.TEMPERATURE] = row % 2
            each.params_f32[slot, Param.FREQUENCY_PENALTY] = row / 2
            each.params[slot, Param.NUM_LOGPROBS] = 2
        each.params[each.row_slots[3], Param.NUM_STOP_TOKENS] = 0  # nothing may come, and the text may end
    logits = torch.randn(4, 603, generator=torch.Generator().manual_seed(4)) * 3
    device.sample(logits, batch)
    sample_plainly(logits, expected, 4)
    assert batch.sampled_tokens.tolist() == expected.sampled_tokens.tolist()
    torch.testing.assert_close(batch.sampled_logprobs[:3], expected.sampled_logprobs[:3], rtol=1e-5, atol=1e-5)


def test_rows_beyond_the_batch_and_outputs_that_nobody_asked_for_are_left_alone(device: Device) -> None:
    batch = make_row_batch(Limits(num_logprobs=2), 0)
    batch.header[Header.NUM_ROWS] = 0
    batch.sampled_tokens.fill_(-7)
    device.sample(torch.zeros(1, VOCAB), batch)
    assert batch.sampled_tokens.tolist() == [-7] and not batch.top_tokens.any()


@dataclass(frozen=True)
class Limits:
    """What may be drawn, and how many logprobs are asked for."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    num_logprobs: int = -1


def make_row_batch(limits: Limits, step: int) -> Batch:
    """Return a batch of one row."""
    batch = Batch.allocate(max_tokens=1, max_rows=1, num_slots=1, max_blocks=1, max_model_len=64)
    batch.header[Header.NUM_ROWS], batch.context_lens[0] = 1, step
    words = {Param[name.upper()]: value for name, value in vars(limits).items()}
    set_params(batch, 0, {**words, Param.REPETITION_PENALTY: 1.0, Param.SEED_LOW: -0x1234568, Param.SEED_HIGH: 5})
    return batch


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


@pytest.mark.parametrize(("kind", "scale"), KINDS)
def test_the_floor_is_that_of_sorting(device: Device, kind: str, scale: float) -> None:
    row = make_row(kind, scale)
    logits = torch.from_numpy(row)[None].bfloat16()
    for number, limits in enumerate(LIMITS):
        floor = device.find_floor(logits, make_row_batch(limits, number))
        assert np.count_nonzero(row >= np.float32(floor)) == count_by_sorting(row, limits), limits


def test_more_than_all_logits_and_nearly_all_of_the_mass(device: Device) -> None:
    row = make_row("normal", 3.0)
    logits = torch.from_numpy(row)[None].bfloat16()
    floor = device.find_floor(logits, make_row_batch(Limits(top_k=100_000), 7))
    assert np.count_nonzero(row >= floor) == np.isfinite(row).sum()
    limits = Limits(top_p=0.9999)
    found = np.count_nonzero(row >= device.find_floor(logits, make_row_batch(limits, 7)))
    masses = np.cumsum(np.exp(np.sort(row.astype(np.float64))[::-1]))
    missed = masses[[found - 1, count_by_sorting(row, limits) - 1]] / masses[-1]
    assert abs(missed[0] - missed[1]) < 4e-6


@pytest.mark.parametrize(("kind", "scale"), [("few levels", 2.0), ("equal", 1.0), ("far", 2.0)])
@pytest.mark.parametrize("count", [0, 20])
def test_the_best_logprobs_are_those_of_sorting_with_the_lowest_of_equal_tokens(
    device: Device, kind: str, scale: float, count: int
) -> None:
    row, batch = make_row(kind, scale), make_row_batch(Limits(temperature=0.0, num_logprobs=count), 7)
    device.sample(torch.from_numpy(row)[None].bfloat16(), batch)
    best = np.argsort(-row, kind="stable")[:count]
    log_mass = torch.from_numpy(row).double().logsumexp(0).item()
    assert batch.sampled_logprobs[0].item() == pytest.approx(row.max() - log_mass, abs=1e-4)
    assert batch.top_tokens[0, :count].tolist() == best.tolist()
    assert batch.top_logprobs[0, :count].tolist() == pytest.approx((row[best] - log_mass).tolist(), abs=1e-4)


def test_logits_that_are_not_finite_come_last(device: Device) -> None:
    row = np.full(VOCAB, -np.inf, np.float32)
    row[[9, 4, 2000]] = 1.0, 2.0, 1.0
    batch = make_row_batch(Limits(temperature=0.0, num_logprobs=5), 7)
    device.sample(torch.from_numpy(row)[None].bfloat16(), batch)
    assert batch.top_tokens[0, :5].tolist() == [4, 9, 2000, 0, 1]
    last = [1 - np.log(np.exp(2) + 2 * np.e), -np.inf, -np.inf]
    assert batch.top_logprobs[0, 2:5].tolist() == pytest.approx(last)


def test_a_hidden_stop_token_that_is_no_number_leaves_logprobs_without_numbers(device: Device) -> None:
    batch = make_row_batch(Limits(temperature=0.0, num_logprobs=3), 7)
    batch.stop_tokens[0, 0], batch.params[0, Param.NUM_STOP_TOKENS], batch.params[0, Param.MIN_TOKENS] = 11, 1, 50
    logits = torch.from_numpy(make_row("normal", 1.0))[None].bfloat16()
    best = int(logits[0].argmax())
    logits[0, 11] = torch.nan
    device.sample(logits, batch)
    assert batch.sampled_tokens[0] == best and batch.top_tokens[0, :3].tolist() == [0, 1, 2]
    assert batch.sampled_logprobs[0].isnan() and batch.top_logprobs[0, :3].isnan().all()
