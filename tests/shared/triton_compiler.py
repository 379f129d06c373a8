# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: kernels that tests launch are compiled for Hopper and launched nowhere.

Triton's interpreter runs what its compiler refuses, and knows nothing of shared memory. No GPU is needed. Tests then
fail, since nothing is computed: what counts is the closing lines, one of the kernels that compile, and one for each
kernel that does not.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import triton_interpreter

_TARGET = GPUTarget("cuda", 90, 32)
_SHARED_BYTES = 227 << 10  # that a block of Hopper may have

_compiled: set[str] = set()
_refused: dict[str, str] = {}


class _Hopper:
    """What Triton asks of a GPU before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return _TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


triton_interpreter.IS_INTERPRETED = True  # tests keep to what needs no GPU
_run: Any = JITFunction.run


def _compile(kernel: JITFunction[Any], *arguments: Any, **options: Any) -> Any:
    """Take the place of JITFunction.run()."""
    name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
    try:
        found = _run(kernel, *arguments, **{**options, "warmup": True})
    except Exception as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        _refused[name] = f"{type(causes[-1]).__name__}: {causes[-1]}".replace("\n", " ")[-400:]
        raise
    if found.metadata.shared > _SHARED_BYTES:
        _refused[name] = f"{found.metadata.shared} bytes of shared memory"
    _compiled.add(name)
    return found


def pytest_configure() -> None:
    """Take the GPU's place."""
    driver.set_active(cast("Any", _Hopper()))
    cast("Any", JITFunction).run = _compile


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell what compiled."""
    terminalreporter.write_line(f"compiled kernels: {' '.join(sorted(_compiled))}")
    for name, reason in sorted(_refused.items()):
        terminalreporter.write_line(f"refused kernel: {name}: {reason}")
