# SPDX-License-Identifier: Apache-2.0
"""Partial sums that kernels push to all ranks: which plans have them, and that each is added up once, and next."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blink.formats.base import Weight
from blink.kernels.cpu.all_reduce import CpuRanks
from blink.kernels.gpu.comm import push
from blink.runner.cpu_device import CpuDevice
from blink.runner.matmul import linear
from golden_plans import CASES, show_plan
from model_families import check, generate, make_prompts, save_model

PROMPTS = make_prompts()[2:5]
PUSHED = "partial sums pushed to all ranks"


def show_pushed(name: str) -> dict[str, set[str]]:
    """Return for each size of step of a recorded plan the operations that push their partial sums."""
    found: dict[str, set[str]] = {}
    [case] = [one for one in CASES if one.name == name]
    for line in show_plan(case).splitlines():
        if not line.startswith(" "):
            found[line] = set()
        elif line.endswith(PUSHED):
            found[next(reversed(found))].add(line.split()[0])
    return found


@pytest.mark.parametrize(
    ("name", "operations"),
    [("llama-3-8b-bf16-tp2", {"o_proj", "down"}), ("llama-3-8b-fp8-tp2", {"o_proj", "down"}),
     ("qwen3-30b-a3b-fp8-block-tp4", {"o_proj"})],
)  # fmt: skip
def test_gemvs_of_ranks_push_once_that_has_run_on_a_gpu(
    name: str, operations: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(show_pushed(name).values()) or push.HAS_RUN_ON_GPU
    monkeypatch.setattr(push, "HAS_RUN_ON_GPU", True)
    for title, found in show_pushed(name).items():
        assert found == (operations if title in ("decode, 1 row", "decode, 2 rows") else set()), title


class _Counts:
    def __init__(self) -> None:
        self.pushed = itertools.count()


@pytest.mark.parametrize("name", ["llama-3.1", "gemma2", "qwen3_moe-plain", "gpt_oss", "granite", "olmo2"])
def test_each_pushed_sum_is_asked_for_next(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, held = _Counts(), dict[int, Tensor]()  # by rank: what was pushed, and is not yet added up

    def push_linear(self: CpuRanks, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        assert self.rank not in held
        held[self.rank] = linear(x, weight, bias)
        next(counts.pushed)
        return torch.empty_like(held[self.rank], device="meta")

    add, join = CpuRanks.add, CpuRanks.join

    def add_pushed(self: CpuRanks, partial: Tensor) -> Tensor:
        assert partial.is_meta == (self.rank in held)
        return add(self, held.pop(self.rank) if partial.is_meta else partial)

    def join_next(self: CpuRanks, part: Tensor) -> Tensor:
        assert self.rank not in held
        return join(self, part)

    monkeypatch.setattr(CpuDevice, "pushes", lambda *_: True)
    monkeypatch.setattr(CpuRanks, "push", push_linear)
    monkeypatch.setattr(CpuRanks, "add", add_pushed)
    monkeypatch.setattr(CpuRanks, "join", join_next)
    model = save_model(name, tmp_path)
    check(model, PROMPTS, generate(tmp_path, PROMPTS, "cpu", tensor_parallel_size=2))
    assert next(counts.pushed) > 10 and not held
