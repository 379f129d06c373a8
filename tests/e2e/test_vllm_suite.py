# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of its API and parsers, unchanged, from a checkout that BLINK_VLLM_SUITE names.

What needs an internal of vLLM's is listed test by test in vllm_suite/excluded.txt. docs/vllm-suite.md tells
how to run one file by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_SUITE = Path(__file__).with_name("vllm_suite")
_SHARED = Path(__file__).resolve().parents[1] / "shared"
_CHECKOUT = os.environ.get("BLINK_VLLM_SUITE", "")
# How much of what is not excluded passes, at least; these may only rise. The aim is 0.9.
_SHARES = {"entrypoints": 0.9, "reasoning": 0.94, "tool_parsers": 0.915}

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not _CHECKOUT, reason="needs a checkout of vLLM in BLINK_VLLM_SUITE"),
    pytest.mark.skipif(find_spec("pytest_asyncio") is None, reason="needs the Python package pytest-asyncio"),
]


def files_of(folder: str) -> list[str]:
    lines = (_SUITE / "files.txt").read_text().splitlines()
    return [line for line in lines if line.startswith(f"tests/{folder}/")]


@pytest.mark.parametrize(("folder", "share"), _SHARES.items())
def test_vllms_tests_pass(folder: str, share: float, tmp_path: Path) -> None:
    found = run(files_of(folder), tmp_path / "results.json")
    passed = sum(file["passed"] for file in found.values())
    failed = [name for file in found.values() for name in file["failed"]]
    for name, file in sorted(found.items()):
        print(f"{name} | {file['passed']} passed | {len(file['failed'])} failed | {file['excluded']} excluded")
    print(*failed, sep="\n")
    assert passed >= share * (passed + len(failed)) > 0


def run(files: list[str], results: Path) -> dict[str, dict[str, Any]]:
    """Run files of the checkout in a process of their own and return what became of each."""
    folders = [str(_SUITE), str(_SHARED), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "HF_HUB_OFFLINE": "1"}
    environment["BLINK_VLLM_RESULTS"] = str(results)
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-q", "-c", os.devnull, "--rootdir=.", "--timeout=300"]
    command += ["--confcutdir=tests/entrypoints", "--continue-on-collection-errors", "-p", "no:cacheprovider", *files]
    subprocess.run(command, cwd=_CHECKOUT, env=environment, check=False)
    return json.loads(results.read_text())
