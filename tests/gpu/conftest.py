# SPDX-License-Identifier: Apache-2.0
"""Where kernels are tested: on the GPU, or with TRITON_INTERPRET=1 in Triton's interpreter.

tests/early/test_triton_interpreted.py does the latter in the gate.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_interpreter import IS_INTERPRETED, convert_float

_launched: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if most := int(os.environ.get("BLINK_TEST_CASES", "0")):
        taken = list(take_cases(items, most))
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = taken
    if not IS_INTERPRETED:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)


def take_cases(items: list[pytest.Item], most: int) -> Iterator[pytest.Item]:
    """Return some cases of each test, evenly from the first to the last."""
    for _, group in itertools.groupby(items, lambda item: (item.path, getattr(item, "originalname", item.name))):
        cases = list(group)
        count = min(most, len(cases))
        yield from (cases[place * (len(cases) - 1) // max(count - 1, 1)] for place in range(count))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _launched:
        terminalreporter.write_line(f"interpreted kernels: {' '.join(sorted(_launched))}")


@pytest.fixture
def device() -> torch.device:
    """Return where the kernels run."""
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture(params=["CLUSTER", "BLOCK"], ids=str.lower)
def _each_sampling_group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test sample by clusters, where there are any, and by blocks."""
    from blink.kernels.gpu import sampling

    if request.param == "CLUSTER" and sampling.find_group() is sampling.Group.BLOCK:
        pytest.skip("needs Hopper")
    monkeypatch.setattr(sampling, "find_group", lambda: sampling.Group[request.param])


@pytest.fixture
def _nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget how GEMMs are computed, before a test and after it."""
    from blink.kernels.gpu import autotuner

    monkeypatch.setattr(autotuner, "_chosen", {})
    monkeypatch.setattr(autotuner, "_kept", {})


@pytest.fixture(autouse=True)
def _record_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def record(kernel: InterpretedFunction[Any], *arguments: Any, **options: Any) -> None:
            _launched.add(f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}")
            run(kernel, *arguments, **options)

        monkeypatch.setattr(InterpretedFunction, "run", record)
        monkeypatch.setattr("triton.runtime.interpreter._convert_float", convert_float)
