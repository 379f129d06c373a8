# SPDX-License-Identifier: Apache-2.0
"""Rules of the whole suite: GPU tests are skipped, with a reason, where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import blink.engine  # noqa: F401  # pyright: ignore[reportUnusedImport]  (sets OpenMP before a test loads torch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Path("/dev/nvidiactl").exists():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: there is no /dev/nvidiactl")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
