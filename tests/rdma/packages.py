# SPDX-License-Identifier: Apache-2.0
"""Debian packages for the RDMA rig: fetched with apt and unpacked into a cache folder; nothing is installed.

Besides apt-get and dpkg-deb, which every Debian has, the machine needs nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

TOOLS = (
    "qemu-system-x86",
    "seabios",
    "busybox-static",
    "iproute2",
    "strace",
    "libibverbs1",
    "ibverbs-providers",
    "libibverbs-dev",
)
KERNEL = "linux-image-amd64"  # the cloud kernel has no soft-RoCE
_RECIPE = 1  # raise it when what prepare() makes of the packages changes
_APT_TIMEOUT = 300


class RigUnavailableError(Exception):
    """The rig cannot be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Packages:
    """Where the unpacked packages are."""

    tools: Path  # a root with qemu and the RDMA libraries
    kernel: Path  # a root with /boot and /lib/modules

    @property
    def libraries(self) -> Path:
        return self.tools / "usr" / "lib" / "x86_64-linux-gnu"

    def command(self, name: str) -> list[str]:
        """Return the command line that runs one of the fetched programs on this machine, with its own libraries."""
        program = self.tools / "usr" / "bin" / name
        if not program.exists():  # the machine has it already
            return [shutil.which(name) or name]
        return ["/usr/bin/env", f"LD_LIBRARY_PATH={self.libraries}", str(program)]


def rig_cache() -> Path:
    """Return the folder that keeps packages between runs."""
    root = os.environ.get("BLINK_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "blink") / "rdma-rig"


def fetch_packages() -> Packages:
    """Return the unpacked packages, fetching them at the first call.

    Raises:
        RigUnavailableError: this is no Debian on x86-64, or the packages cannot be fetched.
    """
    if platform.machine() != "x86_64" or _release().get("ID") != "debian":
        raise RigUnavailableError("needs Debian on x86-64")
    try:
        cache = rig_cache()
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            root = cache / _key()
            if not (root / "done").exists():
                shutil.rmtree(root, ignore_errors=True)
                _prepare(root)
                (root / "done").touch()
        return Packages(root / "tools", root / "kernel")
    except OSError as error:
        raise RigUnavailableError(f"cannot keep packages in {rig_cache()}: {error}") from error


def _key() -> str:
    return hashlib.sha256(repr((_RECIPE, TOOLS, KERNEL, _release()["VERSION_ID"])).encode()).hexdigest()[:16]


def _release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:  # some other Unix
        return {}


def _prepare(root: Path) -> None:
    debs = root / "debs"
    debs.mkdir(parents=True)
    try:
        _download(debs, [])
    except RigUnavailableError:
        # No package lists on this machine, or stale ones: fetch lists of our own.
        own = [f"-oDir::State::Lists={root}/lists", f"-oDir::Cache={root}/apt", "-oAPT::Sandbox::User=root"]
        (root / "lists" / "partial").mkdir(parents=True)
        (root / "apt" / "archives" / "partial").mkdir(parents=True)
        _apt(["apt-get", *own, "-qq", "update"], root)
        _download(debs, own)
    for deb in sorted(debs.glob("*.deb")):
        kind = "kernel" if deb.name.startswith("linux-image") else "tools"
        subprocess.run(["dpkg-deb", "-x", deb, root / kind], check=True)
    _merge_usr(root / "tools")
    shutil.rmtree(debs)


def _download(folder: Path, options: list[str]) -> None:
    """Download the tools with all that they need beyond what is installed, and the kernel alone."""
    plan = _apt(["apt-get", *options, "-s", "install", "--reinstall", "--no-install-recommends", *TOOLS], folder)
    names = set(re.findall(r"^Inst (\S+)", plan, re.MULTILINE)) | set(TOOLS)
    kernels = _apt(["apt-cache", *options, "depends", KERNEL], folder)
    match = re.search(r"Depends: (linux-image-\S+)", kernels)
    if match is None:
        raise RigUnavailableError(f"this release has no package {KERNEL}")
    _apt(["apt-get", *options, "-qq", "-oAPT::Sandbox::User=root", "download", match[1], *sorted(names)], folder)


def _apt(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_APT_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RigUnavailableError(f"{command[0]} did not end within {_APT_TIMEOUT} s") from error
    if result.returncode:
        raise RigUnavailableError(f"apt: {(result.stderr.strip() or 'failed').splitlines()[-1]}")
    return result.stdout


def _merge_usr(root: Path) -> None:
    """Move /bin, /sbin and /lib into /usr, as on a running Debian: a directory would hide the link below it."""
    for name in ("bin", "sbin", "lib", "lib64"):
        old = root / name
        if old.is_dir() and not old.is_symlink():
            shutil.copytree(old, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(old)


if __name__ == "__main__":
    try:
        print(fetch_packages().tools)
    except RigUnavailableError as error:
        sys.exit(f"packages: {error}")
