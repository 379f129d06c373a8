# SPDX-License-Identifier: Apache-2.0
"""What a decode layer of GLM-4.7-Flash launches at one row, with kernels of few rows and without them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if find_spec("triton") is None:
    pytest.skip("needs triton: pip offers it for Linux on x86-64 and arm64", allow_module_level=True)

import launch_traces
from blink.kernels.batch import Batch
from blink.kernels.gpu import autotuner, pdl
from blink.kernels.gpu.latent import store
from blink.kernels.gpu.moe import router
from blink.plan.site import Bucket
from blink.runner.run import Runner
from launch_trace import pretended_gpu

_CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
_NO_KERNELS = re.compile(
    r"view|slice|select|t\b|transpose|expand|reshape|unsqueeze|empty|detach|alias|split|flatten|bmm|mm\b|linear"
)


class _Operations(TorchDispatchMode):
    """Notes PyTorch's operations that launch kernels, but for GEMMs, which are noted already."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if not _NO_KERNELS.search(name):
            self._lines.append(f"torch.{name}")
        return func(*args, **(kwargs or {}))


def list_layer(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of what a layer with experts launches."""
    monkeypatch.setattr(launch_traces, "_CONFIGS", _CONFIGS)
    lines: list[str] = []
    with pretended_gpu(lines.append):
        model = launch_traces.load_case(launch_traces.Case("glm-4.7-flash", "bf16"))
        batch = Batch.allocate(
            max_tokens=16, max_rows=4, num_slots=1, max_blocks=8, max_model_len=128, device=model.device
        )
        runner, kv_cache = Runner(model), model.allocate_kv_cache(8, 16)
        runner.compute_logits(batch, kv_cache, Bucket(1, 1, decoding=True))  # what is made once
        lines.clear()
        with _Operations(lines):
            runner.compute_logits(batch, kv_cache, Bucket(1, 1, decoding=True))
    names = [re.sub(r"[(<].*| \d+x.*", "", line).rpartition(".")[2] for line in lines]
    attention = [place for place, name in enumerate(names) if name == "attend_latents"]
    return names[attention[1] + 1 : attention[2] + 1]  # from one layer's attention to the next one's


def take_few(name: str, candidates: dict[str, Any]) -> Any:  # noqa: ARG001
    """Compute by the GEMV."""
    return candidates[next(code for code in candidates if code.startswith("GEMV"))]()


def take_first(name: str, candidates: dict[str, Any]) -> Any:  # noqa: ARG001
    """Compute by the kernel of many rows."""
    return next(iter(candidates.values()))()


EXPERTS = ["permute_rows", "grouped_gemm", "grouped_gemm", "_combine"]


def test_a_layer_launches_few_kernels_of_which_none_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "compute", take_few)
    monkeypatch.setattr(store, "MOST_TOKENS", 8)
    monkeypatch.setattr(router, "MOST_FUSED_ROWS", 8)
    shared = ["gemv", "gemv", "_add"]
    attention = ["_norm", "gemv", "_norm", "gemv", "_absorb_turn_and_store", "attend_latents"]
    assert list_layer(monkeypatch) == [
        "_expand",
        "gemv",
        "_norm",
        "_multiply_and_choose",
        *EXPERTS,
        *shared,
        *attention,
    ]


def test_a_layer_launches_more_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner, "compute", take_first)
    monkeypatch.setattr(store, "MOST_TOKENS", 0)
    monkeypatch.setattr(router, "MOST_FUSED_ROWS", 0)
    router_kernels = ["to", "linear", "_choose"]
    shared = ["linear", "_activate", "linear", "_add"]
    attention = ["_norm", "linear", "_norm", "linear", "bmm", "_turn_and_store", "attend_latents"]
    assert list_layer(monkeypatch) == ["bmm", "linear", "_norm", *router_kernels, *EXPERTS, *shared, *attention]


def test_kernels_of_few_rows_overlap() -> None:
    lines: list[str] = []
    with pretended_gpu(lines.append):
        x = torch.empty(pdl.MOST_ROWS, 8, device="cuda")
        assert pdl.overlap(x, pdl.MOST_ROWS) == {"PDL": True, "launch_pdl": True}
        assert pdl.overlap(x, pdl.MOST_ROWS + 1) == {}
    assert pdl.overlap(torch.empty(1, 8), 1) == {}
