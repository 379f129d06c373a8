# SPDX-License-Identifier: Apache-2.0
"""The types of the package and of its tests, the GPU's modules among them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from early import EarlyModule

_pyright = EarlyModule("pyright", "--pythonpath", sys.executable)
begin = _pyright.begin


@pytest.mark.early
@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute of one core
@pytest.mark.skipif(find_spec("pyright") is None, reason="needs pyright: make test installs it")
def test_pyright_has_no_complaint() -> None:
    status, output = _pyright.wait()
    assert status == 0, output
