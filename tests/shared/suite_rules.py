# SPDX-License-Identifier: Apache-2.0
"""pytest in a folder of small modules, under the rules of this suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from skips import LIST

_TESTS = LIST.parent


def run_pytest(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder; of the plugins, only those that the rules need are loaded."""
    plugins = ["-p", "conftest", "-p", "pytest_timeout", "-p", "xdist.plugin", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-c", str(_TESTS.parent / "pyproject.toml"), *flags, str(folder)],
        env={**os.environ, "PYTHONPATH": f"{_TESTS}:{_TESTS / 'shared'}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
