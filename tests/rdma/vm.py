# SPDX-License-Identifier: Apache-2.0
"""A throw-away virtual machine with a soft-RoCE device: python tests/rdma/vm.py COMMAND runs a command in one.

Its root is this machine's file system, read-only under a layer in memory, so that checkout and interpreter are simply
there. Software emulation: nothing about speed can be learned in it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from initramfs import build_initramfs, file_archive
from packages import Packages, RigUnavailableError, fetch_packages

HERE = Path(__file__).resolve().parent
_DIED = 99
# A machine ends with whoever started it, and gives way to everything else; yet beside processes that never sleep it
# must get on (at the lowest priority it would have a sixtieth of a core).
_LOW_PRIORITY = ("setpriv", "--pdeathsig", "KILL", "nice", "-n", "5")

_running: set[subprocess.Popen[str]] = set()
_over = threading.Event()  # nobody waits for a machine any more


@dataclass(frozen=True, slots=True)
class Link:
    """One end of a cable between two machines: the two Unix sockets of a pair, in this end's order."""

    own: Path
    other: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a machine ended."""

    status: int  # the command's exit status; 99 if the machine did not live to tell
    console: str
    report: str  # what the command wrote to descriptor 3
    packages: str = ""  # what it was made of


class Machine:
    """A running virtual machine."""

    def __init__(
        self,
        command: str,
        *,
        number: int = 1,
        link: Link | None = None,
        cpus: int = 2,
        memory_mb: int = 4096,
        echo: bool = False,
    ) -> None:
        """Boot and run a command of the shell; `number` becomes the last part of the address 10.9.0.x.

        Raises:
            RigUnavailableError: this machine cannot run the rig.
        """
        packages = fetch_packages()
        self._packages = packages.describe()
        self._folder = tempfile.TemporaryDirectory(prefix="blink-vm-")
        folder = Path(self._folder.name)
        self._report = folder / "report"
        initrd = folder / "initrd"
        initrd.write_bytes(_base(packages) + file_archive("command.sh", command.encode()))
        options = ["-smp", str(cpus), "-m", str(memory_mb), "-initrd", str(initrd)]
        options += ["-serial", "stdio", "-serial", f"file:{self._report}"]
        # A busy host may not let the guest see ten ticks of its timer in time: it is not to count them.
        line = "console=ttyS0 quiet panic=-1 no_timer_check mitigations=off random.trust_cpu=on"
        line += f" rig_number={number}"
        self._process = subprocess.Popen(
            [*_LOW_PRIORITY, *_qemu(packages), *options, "-append", line, *(_cable(link, number) if link else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        _running.add(self._process)
        if _over.is_set():
            self._process.kill()
        self._echo = echo
        self._console: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, timeout: float) -> Outcome:
        """Wait for the machine's end, or end it after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._console.append(f"rig: ended after {timeout:g} s\n")
        _running.discard(self._process)
        self._reader.join(5)
        report = self._report.read_text(errors="replace") if self._report.exists() else ""
        self._folder.cleanup()
        status = re.search(r"^@status=(\d+)\s*\Z", report, re.MULTILINE)
        text = report[: status.start()] if status else report
        return Outcome(int(status[1]) if status else _DIED, "".join(self._console), text, self._packages)

    def kill(self) -> Outcome:
        """End the machine at once."""
        self._process.kill()
        return self.wait(5)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._console.append(line)
            if self._echo:
                print(line, end="", flush=True)


def end_all_machines() -> None:
    """End the machines that still run, and those that are about to."""
    _over.set()
    for process in list(_running):
        process.kill()


def shell_command(arguments: list[str], environment: Mapping[str, str], folder: Path | None = None) -> str:
    """Return the shell text that runs a program in a folder (this one, if none is given) with these variables set."""
    kept = {"PATH": os.environ["PATH"], "HOME": str(Path.home()), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    settings = [f"{name}={value}" for name, value in {**kept, **environment}.items()]
    return (
        shlex.join(["cd", str(folder or Path.cwd())])
        + "\nulimit -l unlimited\n"
        + shlex.join(["env", *settings, *arguments])
    )


def _base(packages: Packages) -> bytes:
    """Return the part of the boot archive that is the same for all machines."""
    path = packages.kernel / "initramfs"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            fresh = path.with_suffix(".new")
            fresh.write_bytes(build_initramfs(packages.kernel, packages.tools / "usr/bin/busybox"))
            fresh.replace(path)  # whole, or not there
            shutil.rmtree(packages.kernel / "lib")  # 400 MB that nobody needs any more
    scripts = {"init": "init.sh", "guest.sh": "guest.sh"}
    return path.read_bytes() + b"".join(
        file_archive(name, (HERE / file).read_bytes()) for name, file in scripts.items()
    )


def _qemu(packages: Packages) -> list[str]:
    command = packages.command("qemu-system-x86_64")
    for folder in ("share/qemu", "share/seabios", "lib/ipxe/qemu"):
        command += ["-L", str(packages.tools / "usr" / folder)]
    command += [
        "-machine",
        "q35",
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "max,-avx,-avx2,-fma,-f16c",
        "-nodefaults",
        "-no-user-config",
    ]
    command += ["-display", "none", "-no-reboot", "-kernel", str(next((packages.kernel / "boot").glob("vmlinuz-*")))]
    for name, path in (("host", Path("/")), ("tools", packages.tools)):
        command += ["-fsdev", f"local,id={name},path={path},security_model=none,readonly=on,multidevs=remap"]
        command += ["-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]
    return [*command, "-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng"]


def _cable(link: Link, number: int) -> list[str]:
    # Datagrams: over a stream, Nagle's algorithm adds 40 ms to each exchange.
    ends = f"local.type=unix,local.path={link.own},remote.type=unix,remote.path={link.other}"
    card = f"virtio-net-pci,netdev=cable,mac=52:54:00:00:00:{number:02x},romfile="
    return ["-netdev", f"dgram,id=cable,{ends}", "-device", card]


if __name__ == "__main__":
    try:
        sys.exit(Machine(shell_command(["bash", "-c", " ".join(sys.argv[1:])], {}), echo=True).wait(600).status)
    except RigUnavailableError as unavailable:
        sys.exit(f"rig: {unavailable}")
