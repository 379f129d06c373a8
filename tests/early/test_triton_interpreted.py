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
from interpreted import EVERY_CASE, SOME_CASES, TESTS


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


_COMMAND = ("pytest", "-q", "-p", "no:cacheprovider", "--timeout=600", *TESTS)
_SOME = EarlyModule(*_COMMAND, **SOME_CASES)
_PATH = {"PYTHONPATH": str(Path(__file__).parents[1] / "shared")}
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
    every = EarlyModule(*_COMMAND, **EVERY_CASE)
    every.begin()
    check(*every.wait())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_triton_kernel_compiles_for_hopper() -> None:
    """Its interpreter takes what the compiler refuses; here nothing is computed, so that the tests themselves fail."""
    compiler = EarlyModule(*_COMMAND, "-p", "triton_compiler", **_PATH, BLINK_TEST_CASES="2")
    compiler.begin()
    _, output = compiler.wait()
    assert re.findall(r"^refused kernel: .*", output, re.MULTILINE) == []
    assert read_names("compiled", output) == list_kernels()


def check(status: int, output: str) -> None:
    """Check that the tests passed and ran every kernel."""
    assert status == 0, output[-8000:]
    kernels = list_kernels()
    assert len(kernels) >= 10
    assert read_names("interpreted", output) == kernels


def read_names(done: str, output: str) -> set[str]:
    """Return the kernels that a closing line names."""
    line = re.search(rf"^{done} kernels: (.*)$", output, re.MULTILINE)
    assert line is not None, output[-8000:]
    return set(line[1].split())
