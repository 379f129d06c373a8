# SPDX-License-Identifier: Apache-2.0
"""What steps launch on an H100 is what was recorded: each kernel with its tiles, of each model, format and size."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("needs triton: pip offers it for Linux on x86-64 and arm64", allow_module_level=True)

from launch_traces import CASES, RECORDED, Case, trace

_IN_GATE = {"llama-3-8b-bf16", "llama-3-8b-fp8-first-bf16", "qwen3-30b-a3b-bf16", "gpt-oss-20b-mxfp4"}


_MARKED = [pytest.param(case, marks=[] if case.name in _IN_GATE else pytest.mark.long, id=case.name) for case in CASES]


@pytest.mark.parametrize("case", _MARKED)
def test_steps_launch_what_was_recorded(case: Case) -> None:
    recorded = (RECORDED / f"{case.name}.txt").read_text()
    assert trace(case) == recorded, "if it must: python tests/shared/launch_traces.py writes the files anew"
