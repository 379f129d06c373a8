# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel in Triton's interpreter on the CPU: the kernel tests of tests/gpu, with their cases and oracles.

What it cannot do is skipped there with a reason: products of bfloat16, whose bit patterns it multiplies, and captured
graphs. What it cannot show: programs run one after the other, so neither races nor memory orders are seen, and launch
options (warps, stages) mean nothing.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import blink.kernels.gpu
from early import EarlyModule

_MODULES = (
    "activation",
    "attention",
    "delta_rule_gpu",
    "gguf_matmul",
    "latent_gpu",
    "layer_inputs",
    "mamba_gpu",
    "moe",
    "quantized",
    "rms_norm",
    "rotary",
    "router_gpu",
    "shared_gate",
    "snapshot_copies",
)


def list_kernels() -> set[str]:
    """Return module.name of each function that the host launches: name[grid](...) or module.name[grid](...)."""
    launched: set[str] = set()
    for path in Path(blink.kernels.gpu.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
                continue
            match node.func.value:
                case ast.Name(name):
                    launched.add(f"{path.stem}.{name}")
                case ast.Attribute(ast.Name(module), name):
                    launched.add(f"{module}.{name}")
    return launched


_COMMAND = (
    *("pytest", "-q", "-p", "no:cacheprovider", "--timeout=600"),
    *(f"tests/gpu/test_{name}.py" for name in _MODULES),
)
_ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
_SOME = EarlyModule(*_COMMAND, **_ENVIRONMENT, BLINK_TEST_CASES="1")
begin = _SOME.begin
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip offers it for Linux on x86-64 and arm64"),
]


@pytest.mark.early
@pytest.mark.timeout(900)  # half a minute of one core
def test_every_triton_kernel_passes_some_cases_of_its_tests_in_the_interpreter() -> None:
    check(*_SOME.wait())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_triton_kernel_passes_its_tests_in_the_interpreter() -> None:
    every = EarlyModule(*_COMMAND, **_ENVIRONMENT)
    every.begin()
    check(*every.wait())


def check(status: int, output: str) -> None:
    """Check that the tests passed and ran every kernel."""
    assert status == 0, output[-8000:]
    interpreted = re.search(r"^interpreted kernels: (.*)$", output, re.MULTILINE)
    assert interpreted is not None
    kernels = list_kernels()
    assert len(kernels) >= 10
    assert set(interpreted[1].split()) == kernels
