# SPDX-License-Identifier: Apache-2.0
"""Whether this process runs Triton's kernels in its interpreter, on the CPU, and what is too much for it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

large = pytest.mark.skipif(IS_INTERPRETED, reason="a shape more that takes Triton's interpreter seconds")

_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert as Triton's interpreter, but round to FP8 as torch: the interpreter loses what is carried."""
    if source.name == "fp32" and target.name in _FP8:
        floats = torch.from_numpy(values.copy()).view(torch.float32)
        return floats.to(_FP8[target.name]).view(torch.uint8).numpy()
    return _convert(values, source, target, rounding)


if IS_INTERPRETED:
    from triton.runtime.interpreter import _convert_float as _convert
