# SPDX-License-Identifier: Apache-2.0
"""Whether this process runs Triton's kernels in its interpreter, on the CPU, and what is too much for it."""

from __future__ import annotations

import os

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

large = pytest.mark.skipif(IS_INTERPRETED, reason="a shape more that takes Triton's interpreter seconds")
