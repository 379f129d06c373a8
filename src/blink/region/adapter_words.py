# SPDX-License-Identifier: Apache-2.0
"""The region's words of each adapter: csrc/scheduler/adapters.h has their protocol."""

from __future__ import annotations

from typing import Any

import numpy as np

from blink.region.layout import field_offset, struct_dtype

ADAPTER_WORDS = struct_dtype("AdapterWords")


def adapter_word_offset(header: np.void | np.ndarray[Any, Any], index: int, name: str) -> int:
    """Return where a region has a word of an adapter, in bytes from its start."""
    return int(header["adapters_offset"]) + index * ADAPTER_WORDS.itemsize + field_offset(ADAPTER_WORDS, name)
