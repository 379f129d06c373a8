# SPDX-License-Identifier: Apache-2.0
"""Compilation of the native test programs, once for all processes of a run, and the depth of random tests."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from harness import Step

_HERE = Path(__file__).parent
_CSRC = _HERE.parents[1] / "src" / "blink" / "csrc"
_FLAGS = ["-std=c++20", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{_CSRC}", f"-I{_HERE}"]

settings.register_profile("default", max_examples=80, stateful_step_count=40, deadline=None)
settings.register_profile("ci", max_examples=400, stateful_step_count=50, deadline=None)
settings.register_profile("deep", max_examples=6000, stateful_step_count=60, deadline=None)
for _name in ("default", "ci", "deep"):
    settings.register_profile(
        _name, settings.get_profile(_name), suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

_LANES_TIMEOUT = 1800  # seconds: lanes wait for each other, at each of many thousands of barriers

Compile = Callable[..., Path]
CompileDevice = Callable[..., ctypes.CDLL]
_SHARED_MEMORY = "extern __shared__ __align__(1024) char memory[];"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of several lanes the time that they take where processors are few and busy."""
    for item in items:
        if "lane_steps" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(_LANES_TIMEOUT))


@pytest.fixture(scope="session")
def compile_native(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Return compile(source, *flags): build one of this folder's programs and return its path."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "native"  # of all processes of a run
    folder.mkdir(exist_ok=True)

    def compile_source(source: str, *flags: str) -> Path:
        digest = hashlib.sha256("\0".join((source, *flags)).encode()).hexdigest()
        target = folder / f"{Path(source).stem}-{digest[:16]}"
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may compile it now
            if not target.exists():
                part = target.with_suffix(".part")
                command = ["g++", *_FLAGS, *flags, str(_HERE / source), "-o", str(part)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                part.rename(target)
        return target

    return compile_source


@pytest.fixture(scope="session")
def compile_device(compile_native: Compile, tmp_path_factory: pytest.TempPathFactory) -> CompileDevice:
    """Return compile(program, source, *headers, words=...): one of this folder's programs with device code.

    source: of csrc/kernels; words: this folder's headers, by the paths of those in whose place they stand.
    """

    def compile_source(program: str, source: str, words: Mapping[str, str]) -> ctypes.CDLL:
        folder, kernels = tmp_path_factory.mktemp("sources"), _CSRC / "kernels"
        assert _SHARED_MEMORY in (kernels / source).read_text()
        texts = {source: (kernels / source).read_text()}
        texts |= {name: f'#pragma once\n#include "{header}"\n' for name, header in words.items()}
        for name, text in texts.items():
            path = folder / "kernels" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(_SHARED_MEMORY, "char* memory = block->shared();"))
        flags = ("-O2", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas", f"-iquote{folder}")
        return ctypes.CDLL(str(compile_native(program, *flags)))

    return compile_source


@pytest.fixture(scope="session")
def lane_steps(compile_native: Compile) -> Iterator[Callable[[int], Step]]:
    """Return start(count): a pass of the scheduler on that many threads."""
    library = ctypes.CDLL(str(compile_native("lanes.cpp", "-O1", "-shared", "-fPIC")))
    library.lanes_start.restype = ctypes.c_void_p
    library.lanes_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    library.lanes_stop.argtypes = [ctypes.c_void_p]
    teams: list[int] = []

    def start(count: int) -> Step:
        team = library.lanes_start(count)
        teams.append(team)
        return lambda address, now: library.lanes_step(team, address, now)

    yield start
    for team in teams:
        library.lanes_stop(team)
