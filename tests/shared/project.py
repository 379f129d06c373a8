# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml, read by whatever this Python has for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it


def read_project(root: Path) -> dict[str, Any]:
    """Return the file's tables."""
    return tomllib.loads((root / "pyproject.toml").read_text())
