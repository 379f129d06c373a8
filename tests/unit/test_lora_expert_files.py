# SPDX-License-Identifier: Apache-2.0
"""Files of experts' adapters: which matrix each tensor changes, by PEFT's formulas, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blink.adapters.module import Fused, Module, Orientation
from blink.adapters.peft_files import Adapter, read_adapter
from blink.errors import BadRequestError
from lora_adapters import PREFIX, write_adapter

COUNT, RANK = 3, 2
GATE_UP, DOWN = torch.zeros(COUNT, 8, 6), torch.zeros(COUNT, 6, 4)
BLOCK = "layers.0.mlp.experts"
OUTER, INNER = f"{PREFIX}model.{BLOCK}.lora", f"{PREFIX}model.{BLOCK}.base_layer.lora"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def list_modules(orientation: Orientation = "rows", down: Tensor = DOWN) -> dict[str, Module]:
    """Return the modules of a layer of three experts."""
    found = {
        f"{BLOCK}.gate_up_proj": Module(GATE_UP, slice(0, 8), (8, 6), None, fused=Fused(orientation, 2)),
        f"{BLOCK}.down_proj": Module(down, slice(0, 6), (6, down.shape[2]), None, fused=Fused(orientation, 1)),
    }
    for expert in range(COUNT):
        found[f"{BLOCK}.{expert}.gate_proj"] = Module(GATE_UP, slice(0, 4), (4, 6), None, expert)
        found[f"{BLOCK}.{expert}.up_proj"] = Module(GATE_UP, slice(4, 8), (4, 6), None, expert)
    return found


def read(folder: Path, tensors: dict[str, Tensor], modules: dict[str, Module] | None = None, **config: Any) -> Adapter:
    """Write an adapter of alpha = rank, and read it."""
    values: dict[str, Any] = {"target_modules": [], "target_parameters": BOTH, **config}
    write_adapter(folder, {}, seed=0, rank=RANK, alpha=RANK, tensors=tensors, **values)
    return read_adapter(folder, [modules or list_modules()], 16, torch.empty(0))


def changes(adapter: Adapter, weight: Tensor) -> Tensor:
    """Return what an adapter adds to the matrices of experts."""
    found = torch.zeros_like(weight)
    for update in adapter.updates[id(weight)]:
        found[:, update.rows] += update.up @ update.down
    return found


def fused(sizes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Return the tensors of parameters, by what their names begin with: in and out as PEFT has them."""
    draw, found = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for name, (size, out) in sizes.items():
        found[f"{name}_A.weight"] = torch.randn(RANK * COUNT, size, generator=draw)
        found[f"{name}_B.weight"] = torch.randn(out, RANK * COUNT, generator=draw)
    return found


def peft(tensors: dict[str, Tensor], name: str, form: str) -> Tensor:
    """Return the change of a parameter as PEFT computes it: form: of its elements."""
    down, up = tensors[f"{name}_A.weight"], tensors[f"{name}_B.weight"]
    by_expert, by_rank = down.reshape(COUNT, -1, down.shape[1]), up.reshape(len(up), -1, COUNT)
    return torch.einsum(f"o r e, e r i -> {form}", by_rank, by_expert)


@pytest.mark.parametrize(("form", "turns"), [("e o i", False), ("e i o", True)])
def test_parameters_change_as_peft_has_it(form: str, turns: bool, tmp_path: Path) -> None:
    gate_up, down = ((6, 8), (4, 6)) if not turns else ((8, 6), (6, 4))
    tensors = fused({INNER: gate_up, OUTER: down})
    found = read(tmp_path, tensors)
    torch.testing.assert_close(changes(found, GATE_UP), peft(tensors, INNER, form))
    torch.testing.assert_close(changes(found, DOWN), peft(tensors, OUTER, form))


SQUARE = torch.zeros(COUNT, 6, 6)


@pytest.mark.parametrize(
    ("version", "orientation", "form"),
    [
        ("0.19.1", "rows", "e o i"), ("0.20.0", "rows", "e o i"), ("0.19.0", "rows", "e i o"),
        ("0.17.1", "rows", "e i o"), ("0.19.1", "columns", "e o i"), ("0.18.1", "columns", "e o i"),
        ("0.19.0", "columns", "e i o"),
    ],
)  # fmt: skip
def test_the_version_of_peft_says_how_square_matrices_lie(
    version: str, orientation: Orientation, form: str, tmp_path: Path
) -> None:
    tensors = fused({OUTER: (6, 6)})
    found = read(tmp_path, tensors, list_modules(orientation, SQUARE), target_parameters=BOTH[1:], peft_version=version)
    torch.testing.assert_close(changes(found, SQUARE), peft(tensors, OUTER, form))


@pytest.mark.parametrize("version", [None, "0.19.1.dev0", "later"])
def test_square_matrices_without_a_version_are_refused_by_name(version: str | None, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"experts.lora_A.weight' is of square matrices.*with PEFT 0.19.1"):
        read(
            tmp_path, fused({OUTER: (6, 6)}), list_modules("rows", SQUARE), target_parameters=BOTH[1:],
            peft_version=version,
        )  # fmt: skip


def test_experts_without_an_update_get_zeros(tmp_path: Path) -> None:
    own = f"{PREFIX}model.{BLOCK}.1.up_proj.lora"
    tensors = {f"{own}_A.weight": torch.ones(RANK, 6), f"{own}_B.weight": torch.ones(4, RANK)}
    found = changes(read(tmp_path, tensors, target_modules=["up_proj"], target_parameters=None), GATE_UP)
    expected = torch.zeros_like(GATE_UP)
    expected[1, 4:] = RANK
    assert torch.equal(found, expected)


def test_a_matrix_that_two_tensors_change_is_refused_by_name(tmp_path: Path) -> None:
    own = f"{PREFIX}model.{BLOCK}.1.up_proj.lora"
    single = {f"{own}_A.weight": torch.ones(RANK, 6), f"{own}_B.weight": torch.ones(4, RANK)}
    tensors = fused({OUTER: (6, 8)}) | single
    with pytest.raises(BadRequestError, match="changes a matrix that another tensor changes"):
        read(tmp_path, tensors, target_modules=["up_proj"], target_parameters=BOTH[:1])


@pytest.mark.parametrize(
    ("sizes", "parameters", "reason"),
    [
        ({OUTER: (6, 8)}, BOTH[1:], r"experts.lora_A.weight has the shape \[6, 6\], and must have \[6, 4\]"),
        ({OUTER: (4, 7)}, BOTH[1:], r"experts.lora_B.weight has the shape \[7, 6\], and must have \[6, 6\]"),
        ({OUTER: (4, 6)}, BOTH, "target_parameters has 'mlp.experts.gate_up_proj', of which there is no tensor"),
        ({INNER: (6, 8), OUTER: (4, 6)}, BOTH[1:], "base_layer.lora_A.weight' is of no module among target"),
        ({OUTER: (4, 6)}, ["mlp.experts.other"], "experts.lora_A.weight' belongs to no module"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(
    sizes: dict[str, tuple[int, int]], parameters: list[str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BadRequestError, match=reason):
        read(tmp_path, fused(sizes), target_parameters=parameters)


def test_the_content_hangs_on_how_matrices_lie(tmp_path: Path) -> None:
    options: dict[str, Any] = {"modules": list_modules("rows", SQUARE), "target_parameters": BOTH[1:]}
    found = [
        read(tmp_path / version, fused({OUTER: (6, 6)}), peft_version=version, **options).content
        for version in ("0.18.1", "0.19.0", "0.19.1")
    ]
    assert found[0] == found[1] != found[2]
