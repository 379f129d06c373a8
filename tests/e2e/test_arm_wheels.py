# SPDX-License-Identifier: Apache-2.0
"""A SmartNIC's Arm cores run the frontend: each of its dependencies must have a wheel for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="reads pyproject.toml with Python 3.11 or newer")

_ROOT = Path(__file__).resolve().parents[2]
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")  # Ubuntu 22.04 takes all
_NO_NETWORK = ("Failed to establish a new connection", "Temporary failure in name resolution", "ReadTimeoutError")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("python", ["3.10", "3.12"])  # of Ubuntu 22.04 and 24.04, which BlueField cards run
def test_every_dependency_of_the_frontend_has_a_wheel_for_arm(python: str, tmp_path: Path) -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--report=-"]
    command += ["--disable-pip-version-check", "--retries=1", "--timeout=20", f"--target={tmp_path}"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [*(f"--platform={platform}" for platform in _PLATFORMS), *project["dependencies"]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if result.returncode and any(sign in result.stderr for sign in _NO_NETWORK):
        pytest.skip("needs a package index")
    assert result.returncode == 0, result.stderr
    wheels = {entry["metadata"]["name"].lower() for entry in json.loads(result.stdout)["install"]}
    assert {"numpy", "tokenizers", "uvloop", "httptools", "orjson"} <= wheels  # those with machine code
    assert not wheels & {"torch", "triton", "cuda-core", "nvidia-cuda-runtime"}
