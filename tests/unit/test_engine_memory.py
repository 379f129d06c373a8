# SPDX-License-Identifier: Apache-2.0
"""The CPU engine's memory while it meets ever new lengths of steps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# In a process of its own: oneDNN reads its options when torch is loaded, and pytest's memory is not the engine's.
_GROWTH = """
import random
import blink.engine
import torch
from pathlib import Path
from blink.kernels.linear import pack_weight
from blink.runner.matmul import linear

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.set_num_threads(1)
weight = pack_weight(torch.ones(1024, 256))
assert weight.is_mkldnn
rows = torch.ones(600, 256)
for count in (600, *range(1, 65)):
    linear(rows[:count], weight)
before = resident()
for count in random.Random(36).sample(range(65, 600), 535):
    linear(rows[:count], weight)
print(resident() - before)
"""


_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def grow(capacity: str | None = None) -> int:
    """Return by how many bytes an engine's process grows with 535 new numbers of tokens."""
    variables = {name: value for name, value in os.environ.items() if name not in _CACHES}
    variables |= {"PYTHONPATH": ":".join(sys.path), **(dict.fromkeys(_CACHES, capacity) if capacity else {})}
    process = subprocess.run([sys.executable, "-c", _GROWTH], env=variables, capture_output=True, text=True, check=True)
    return int(process.stdout)


@pytest.mark.long
def test_new_numbers_of_tokens_take_no_memory_for_good() -> None:
    unbounded = grow("1024")
    if unbounded < 64 << 20:
        pytest.skip("this machine's oneDNN compiles no program per shape")
    assert grow() < unbounded / 3
