# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def list_examples() -> list[Path]:
    """Return the programs."""
    return sorted(FOLDER.glob("*.py"))
