# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml, read by whatever this Python has for it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

_READER = "tomllib" if sys.version_info >= (3, 11) else "tomli"  # which pytest brings


def read_project(root: Path) -> dict[str, Any]:
    """Return the file's tables."""
    return importlib.import_module(_READER).loads((root / "pyproject.toml").read_text())
