# SPDX-License-Identifier: Apache-2.0
"""silu(gate) * up of weights of 16 bits by one kernel, against the plain GEMMs: every config, edges of both operands,
what is not finite; and which candidate is chosen, kept and compiled ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.base import matrix_of
from blink.kernels.activation import activate
from blink.kernels.gpu.device import has_warpgroups
from blink.runner.matmul import gated_linear, linear

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_decode_hi_lo import draw, error

from blink.kernels.gpu import autotuner, launch
from blink.kernels.gpu.gemm import fused_gate_up
from blink.kernels.gpu.gemm.fused_gate_up import CONFIGS, TileConfig, list_configs, multiply_with

pytestmark = [
    pytest.mark.skipif(not has_warpgroups(), reason="needs the warpgroup products of Hopper"),
    pytest.mark.usefixtures("_nothing_is_chosen"),
]


def draw_gates(outputs: int, k: int) -> Tensor:
    return draw(2 * outputs, k) * k**-0.5 * 2


def compute(x: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = (x.float() @ gate_up.float().T).chunk(2, 1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("rows", [65, 96, 97, 128, 150, 160, 192, 193, 224, 241, 256])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_split_gives_what_the_activation_gives_of_plain_products(config: TileConfig, rows: int) -> None:
    if config not in list_configs(rows):
        pytest.skip("not made for so many tokens")
    torch.manual_seed(rows)
    for outputs, k in ((1032, 1024), (200, 8192), (4096, 512)):
        x, gate_up = draw(rows, k), draw_gates(outputs, k)
        found = multiply_with(x, gate_up, config)
        assert torch.equal(found, multiply_with(x, gate_up, config))
        assert error(found, compute(x, gate_up)) < 4e-3


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_is_not_finite_stays_in_its_row(config: TileConfig, value: float) -> None:
    torch.manual_seed(3)
    x, gate_up = draw(150, 2048), draw_gates(520, 2048)
    x[77, 5] = value
    found, others = multiply_with(x, gate_up, config), torch.arange(150, device="cuda") != 77
    assert not found[77].isfinite().any() and error(found[others], compute(x, gate_up)[others]) < 4e-3


def test_large_gates_are_neither_lost_nor_made_infinite() -> None:
    torch.manual_seed(4)
    x, gate_up = draw(70, 1024), draw_gates(1024, 1024) * 60
    found, expected = multiply_with(x, gate_up, CONFIGS[0]), compute(x, gate_up)
    assert expected.abs().max() > 1e4 and found.isfinite().all() and error(found, expected) < 4e-3


def test_the_fastest_way_is_chosen_used_in_graphs_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    path = tmp_path / "products.json"
    x, gate_up = draw(150, 2048), draw_gates(2048, 2048)
    before = gated_linear(x, gate_up, "silu")
    assert torch.equal(before, activate(linear(x, gate_up)))  # until something has been chosen
    monkeypatch.setattr(autotuner, "_MIN_GAIN", -10.0)  # so that another candidate than the first is likely to be
    with autotuner.tuning(path):
        found = gated_linear(x, gate_up, "silu")
    assert error(found, compute(x, gate_up)) < 4e-3
    (name,) = (name for name in autotuner._chosen if "silu" in name)
    kept = json.loads(path.read_text())[autotuner.name_machine()]
    assert kept[name] == autotuner._chosen[name] and any("silu" not in other for other in kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gated_linear(x, gate_up, "silu")
    graph.replay()
    assert torch.equal(captured, found)
    monkeypatch.setattr(autotuner, "_chosen", {})
    monkeypatch.setattr(autotuner, "_time", None)  # a start that measured anew would fail
    with autotuner.tuning(path):
        assert torch.equal(gated_linear(x, gate_up, "silu"), found)


def test_what_a_file_names_is_compiled_ahead_and_all_if_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate_up = draw(100, 2048), draw_gates(2048, 2048)
    compiled: list[str] = []
    monkeypatch.setattr(launch, "_compile", lambda name, *_: compiled.append(name))
    launch.compile_ahead(lambda: gated_linear(x, gate_up, "silu"))
    assert len(compiled) == len(CONFIGS)
    candidates = fused_gate_up.list_candidates(x, gate_up)
    name = f"silu(gate) * up of {fused_gate_up.bf16.name_matmul(x, gate_up)}"
    for code, count in ((list(candidates)[2], 1), (None, 0)):
        compiled.clear()
        monkeypatch.setattr(autotuner, "_kept", {name: code})
        launch.compile_ahead(lambda: gated_linear(x, gate_up, "silu"))
        assert len(compiled) == count


@pytest.mark.parametrize(
    ("rows", "outputs", "k"), [(64, 4096, 1024), (257, 4096, 1024), (100, 4100, 1024), (100, 4096, 1056)]
)
def test_what_the_kernel_is_not_made_for_takes_the_other_way(rows: int, outputs: int, k: int) -> None:
    torch.manual_seed(6)
    x, gate_up = draw(rows, k), draw_gates(outputs, k)
    assert fused_gate_up.refuses(matrix_of(gate_up), rows) is not None
    assert torch.equal(gated_linear(x, gate_up, "silu"), activate(linear(x, gate_up)))
    assert torch.equal(gated_linear(x, gate_up, "gelu_tanh"), activate(linear(x, gate_up), "gelu_tanh"))
