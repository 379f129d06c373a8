# SPDX-License-Identifier: Apache-2.0
"""How this package's optional parts are installed."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Say how to install one of the extras of pyproject.toml; the package itself is on no index yet."""
    return f"run pip install '.[{extra}]' in Blink's source directory"
