# SPDX-License-Identifier: Apache-2.0
"""GEMMs in tiles of one order: all tiles of a matrix split k alike and are compiled to the same operations."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("triton") is None:
    pytest.skip("needs triton: pip offers it for Linux on x86-64 and arm64", allow_module_level=True)

import triton
from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

import blink.models
from blink.formats.layouts import Matrix
from blink.kernels.gpu.device import supposing
from blink.kernels.gpu.gemm import in_tiles
from blink.kernels.gpu.gemm.tile_configs import Output
from blink.kernels.gpu.launch import compile_code
from blink.models.weights.source import read_spec
from blink.runner.sites import expected_sites

_CONFIGS = Path(blink.models.__path__[0]) / "configs"
_DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
_OPERATIONS = r"\b(FADD|FMUL|FFMA|MUFU\.(?:EX2|RSQ))\b"
_PER_TOKEN = {Output.GATE: ("FADD", "FMUL", "FFMA", "MUFU.EX2", "MUFU.RSQ"), Output.ADD: ("FADD", "FMUL", "FFMA")}
_MODELS = ("llama-3-8b", "qwen3-32b")


def matrices_of(model: str, *, fp8: bool) -> list[tuple[Matrix, Output]]:
    sites = expected_sites(read_spec(_CONFIGS / model), 16, fp8=fp8)
    layer = sites.layers[0]
    assert layer.dense is not None
    outputs = [(layer.qkv, Output.STORE), (layer.output, Output.ADD), (sites.head, Output.STORE)]
    return [*outputs, (layer.dense[0], Output.GATE), (layer.dense[1], Output.ADD)]


def name_kernel(matrix: Matrix, output: Output, rows: int) -> str:
    tokens = in_tiles.pad(rows, packed=matrix.is_packed)
    return in_tiles.choose_kernel(output, matrix, tokens, norm=output is Output.GATE, writes=None).name


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_all_sizes_of_step_split_k_alike(gpu: str, model: str, fp8: bool) -> None:
    with supposing(gpu):
        for matrix, output in matrices_of(model, fp8=fp8):
            assert in_tiles.refuses(matrix, output) is None
            rows = (1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 1000, 8192)
            names = {name_kernel(matrix, output, count) for count in rows}
            assert len(names) == (3 if fp8 else 4)
            flag, numbers = ("false, ", 3) if fp8 else ("", 3)
            split = rf"<{in_tiles.INSTRUCTION}, {flag}\d+((?:, \d+){{{numbers}}}), \d+, blink"
            assert len({found[1] for name in names if (found := re.search(split, name))}) == 1, names


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_padded_to_whole_tiles_of_each_matrix_of_a_step(packed: bool) -> None:
    """A matrix in 16 bits may be among packed ones, and has larger tiles."""
    with supposing("h200"):
        matrices = [matrices_of("llama-3-8b", fp8=fp8)[0][0] for fp8 in {False, packed}]
        for rows in (*range(1, 200), 256, 300, 1000, 8191, 8192):
            tokens = in_tiles.pad(rows, packed=packed)
            assert tokens >= rows
            for matrix in matrices:
                tile = in_tiles.choose_kernel(Output.STORE, matrix, tokens, norm=True, writes=None).tokens
                assert tokens % tile == 0 and -(-rows // tile) * tile == tokens


def count_operations(name: str, folder: Path) -> tuple[Counter[str], set[str]]:
    """Return how often a kernel's code for Hopper has each operation of floats, and which MMAs."""
    try:
        load_nvidia_dynamic_lib("nvrtc")
    except DynamicLibNotFoundError:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    code: Any = compile_code("sm_90a", (name,)).code
    (folder / "kernel.cubin").write_bytes(code)
    shown = subprocess.run([_DISASSEMBLER, "-c", folder / "kernel.cubin"], capture_output=True, check=True).stdout
    operations = re.findall(_OPERATIONS, shown.decode())
    return Counter(operations), set(re.findall(r"\b[HQ]G?MMA\.\S+", shown.decode()))


@pytest.mark.parametrize("place", [3, 4], ids=["gate", "add"])
def test_a_token_takes_the_same_operations_in_each_tile(place: int, tmp_path: Path) -> None:
    """What the compiler fuses is not left to it: a tile of four times the tokens has four times of each."""
    with supposing("h200"):
        matrix, output = matrices_of("llama-3-8b", fp8=False)[place]
        few, many = (count_operations(name_kernel(matrix, output, rows), tmp_path) for rows in (16, 64))
    assert few[1] == many[1] == {"HGMMA.64x16x16.F32.BF16"}
    for operation in _PER_TOKEN[output]:
        assert 0 < 4 * few[0][operation] == many[0][operation], operation


@pytest.mark.parametrize("norm", ["false", "true"])
def test_stored_tokens_take_the_operations_of_rows_that_decode(norm: str, tmp_path: Path) -> None:
    name = f"blink::attend<4, 128, 128, 8, 16, 4, 4, 2, {norm}, false, false, blink::FormatId::kBf16"
    assert count_operations(f"{name}>", tmp_path) == count_operations(f"{name}, true>", tmp_path)
