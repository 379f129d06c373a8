# SPDX-License-Identifier: Apache-2.0
"""Where kernels are tested: on the GPU, or with TRITON_INTERPRET=1 (small shapes) in Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not _INTERPRETED:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    """Return where the kernels run."""
    return torch.device("cpu" if _INTERPRETED else "cuda")
