# SPDX-License-Identifier: Apache-2.0
"""What a result has to say of where it was made: machine, commit, versions, pressure on the cores."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from blink import __version__
from flat.kinds import l3_bytes

_ROOT: Final = Path(__file__).resolve().parents[2]
_PACKAGES: Final = ("torch", "triton", "cuda-core", "numpy", "vllm", "sglang")


def describe_machine() -> dict[str, Any]:
    """Return the processors, memory, kernel and GPUs of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = Path("/proc/meminfo").read_text().split()[1]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "l3_mib": l3_bytes() >> 20,
        "memory_gib": round(int(memory) / 2**20),
        "kernel": platform.release(),
        "gpus": (_ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines(),
        "driver": (_ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split("\n")[0],
    }


def describe_software() -> dict[str, Any]:
    """Return the commit, whether the tree differs from it, and the versions of what is installed here."""
    versions = {"python": platform.python_version(), "blink": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = _ask("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    changes = _ask("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit or None, "is_changed": bool(changes) if commit else None, "versions": versions}


def read_pressure() -> float | None:
    """Return the seconds in which some process of this machine waited for a core; None if the kernel does not say."""
    try:
        some = Path("/proc/pressure/cpu").read_text().partition("\n")[0]
        return int(some.rpartition("total=")[2]) * 1e-6
    except (OSError, ValueError):
        return None


def process_tree(root: int) -> list[int]:
    """Return a process and all that descend from it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [root]
    for pid in found:  # grows
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
