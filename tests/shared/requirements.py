# SPDX-License-Identifier: Apache-2.0
"""Prints the pins of all that the gate installs beside torch, so that pip resolves nothing.

python tests/shared/requirements.py cpu|cuda
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FILES = {"cpu": ("constraints.txt", "constraints-cpu.txt"), "cuda": ("constraints.txt",)}
# torch comes from an index of its own, before the others; uv is for `make pins` and for long tests alone. CUDA sources
# are compiled without a GPU, too.
_LEFT = {"cpu": r"(torch|uv|cuda-toolkit|nvidia-(?!cuda-(nvrtc|runtime)==)[\w-]+)==", "cuda": r"(torch|uv)=="}


def list_pins(device: str, root: Path = ROOT) -> list[str]:
    """Return the lines of the files of pins that hold for the gate on one kind of device."""
    lines = [line for name in _FILES[device] for line in (root / name).read_text().splitlines()]
    return [line for line in lines if not line.startswith("#") and not re.match(_LEFT[device], line)]


if __name__ == "__main__":
    print("\n".join(list_pins(sys.argv[1])))
