# SPDX-License-Identifier: Apache-2.0
"""Ask another process for torch and the GPUs that it sees: loading it here would take seconds and hundreds of MB."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

_PROBE: Final = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
# Two transfers a clock; kHz and bits.
speeds = [2e3 * getattr(gpu, "memory_clock_rate", 0) * getattr(gpu, "memory_bus_width", 0) / 8 for gpu in gpus]
can_reach = torch.cuda.can_device_access_peer
found = [
    [gpu.name, gpu.total_memory, speed, gpu.major, gpu.minor, sum(can_reach(i, j) for j in range(len(gpus)) if j != i)]
    for i, (gpu, speed) in enumerate(zip(gpus, speeds))
]
print(json.dumps([torch.__version__, found]))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch can use."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes per second, by its data sheet; 0: not known
    major: int = 0  # of its compute capability
    minor: int = 0
    num_peers: int = 0  # other GPUs whose memory it can reach


@dataclass(frozen=True, slots=True)
class TorchReport:
    """What the other process said."""

    version: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""  # its last words, if it failed


@functools.cache
def probe_torch() -> TorchReport:
    """Return what torch sees, asking once."""
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if probe.returncode:
        return TorchReport(error=(probe.stderr.strip().splitlines() or ["died"])[-1])
    version, gpus = json.loads(probe.stdout)
    return TorchReport(version, tuple(Gpu(*gpu) for gpu in gpus))
