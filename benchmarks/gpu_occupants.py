# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""What may be resident on a GPU without a server, each in a process of its own: what such a thing takes is measured.

A context; a kernel of one thread that waits, asleep or spinning; a kernel that reads memory as fast as it comes.
Needs torch and cuda.core.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from gauge import Gauge

_SLEEP_NS = 1_000_000
_THREADS, _BLOCKS_PER_SM = 512, 2
_READS_AT_ONCE = 20  # that are launched before the host waits for them
_START_SECONDS = 60.0
_CODE = """
extern "C" __global__ void wait_for(long long nanoseconds, int sleep_ns) {
  long long begun, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
  do {
    if (sleep_ns > 0) __nanosleep(sleep_ns);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begun < nanoseconds);
}

// Writes nothing unless all words read are 0, which weights are not: so that the compiler keeps the reads.
extern "C" __global__ void __launch_bounds__(512, 2) read_all(const uint4* data, long long count, uint4* unused) {
  uint4 found = {0, 0, 0, 0};
  const long long stride = (long long)gridDim.x * blockDim.x;
#pragma unroll 8
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    const uint4 one = data[i];
    found.x |= one.x, found.y |= one.y, found.z |= one.z, found.w |= one.w;
  }
  if ((found.x | found.y | found.z | found.w) == 0) *unused = found;
}
"""


@dataclass(frozen=True, slots=True)
class Occupant:
    """What a process keeps on the GPU. Its functions run there."""

    name: str
    run: Callable[[Callable[[], None], float], float]  # calls its argument when at work; returns seconds of a pass


def hold_context(ready: Callable[[], None], seconds: float) -> float:
    """Keep a context without a kernel."""
    _open_device()
    ready()
    time.sleep(seconds)
    return seconds


def wait(ready: Callable[[], None], seconds: float, *, sleep_ns: int) -> float:
    """Keep a kernel of one thread that waits; sleep_ns: between two looks at the clock, 0: none."""
    from cuda.core import LaunchConfig, launch

    stream, kernel = _open_device().create_stream(), _compile("wait_for")
    launch(stream, LaunchConfig(grid=1, block=1), kernel, np.int64(seconds * 1e9), np.int32(sleep_ns))
    ready()
    stream.sync()
    return seconds


def read(ready: Callable[[], None], seconds: float, *, num_bytes: int) -> float:
    """Read so many bytes of random weights in bf16 again and again."""
    import torch
    from cuda.core import LaunchConfig, launch

    stream, kernel = _open_device().create_stream(), _compile("read_all")
    data = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
    unused = torch.empty(16, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    config = LaunchConfig(
        grid=_BLOCKS_PER_SM * torch.cuda.get_device_properties(0).multi_processor_count, block=_THREADS
    )
    ready()
    begun, passes = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        for _ in range(_READS_AT_ONCE):
            launch(stream, config, kernel, data.data_ptr(), np.int64(num_bytes // 16), unused.data_ptr())
        stream.sync()
        passes += _READS_AT_ONCE
    return (time.monotonic() - begun) / passes


CONTEXT = Occupant("a context", hold_context)
SLEEPER = Occupant("a kernel that sleeps", functools.partial(wait, sleep_ns=_SLEEP_NS))
SPINNER = Occupant("a kernel that spins", functools.partial(wait, sleep_ns=0))


def make_reader(num_bytes: int) -> Occupant:
    """Return what reads so many bytes in a pass."""
    return Occupant("a kernel that reads", functools.partial(read, num_bytes=num_bytes))


def measure_occupant(gauge: Gauge, occupant: Occupant, seconds: float, settle: float) -> dict[str, float]:
    """Return `watts`, `sm_mhz` and `pass_seconds` of what works for so many seconds, after some to settle.

    Raises:
        SystemExit: its process ends before it works, or takes too long.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(occupant, settle + seconds + 1.0, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_SECONDS):
            raise SystemExit(f"{occupant.name} does not start")
        _receive(ours, occupant)
        time.sleep(settle)
        found = gauge.measure(seconds)
        return {**found, "pass_seconds": _receive(ours, occupant)}
    finally:
        ours.close()
        process.terminate()
        process.join()


def _receive(pipe: Connection, occupant: Occupant) -> float:
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"{occupant.name} failed; its message is above") from None


def _run(occupant: Occupant, seconds: float, pipe: Connection) -> None:
    pipe.send(occupant.run(lambda: pipe.send(0.0), seconds))


def _open_device() -> Any:
    from cuda.core import Device

    device = Device()
    device.set_current()
    return device


def _compile(name: str) -> Any:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(std="c++17", arch=f"sm_{_open_device().arch}")
    return Program(_CODE, "c++", options).compile("cubin").get_kernel(name)
