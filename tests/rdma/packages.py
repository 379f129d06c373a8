# SPDX-License-Identifier: Apache-2.0
"""Debian packages for the RDMA rig: fetched with apt and unpacked into a cache folder; nothing is installed.

Besides apt-get and dpkg-deb, which every Debian has, the machine needs nothing. Versions that are known to work are
taken as long as the archive has them; what else was taken is told by Packages.describe().
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

# By release of Debian: what the tests were last seen to pass with. Debian keeps a kernel under its name for long, but
# drops a version of another package when the next one comes.
PINS: dict[str, dict[str, str]] = {
    "12": {
        "linux-image-6.1.0-56-amd64": "6.1.192-2",
        "qemu-system-x86": "1:7.2+dfsg-7+deb12u18+b3",
        "seabios": "1.16.2-1",
        "busybox-static": "1:1.35.0-4+deb12u1+b1",
        "iproute2": "6.1.0-3",
        "strace": "6.1-0.1",
        "libibverbs1": "44.0-2",
        "ibverbs-providers": "44.0-2",
        "libibverbs-dev": "44.0-2",
    },
}
TOOLS = tuple(name for name in PINS["12"] if not name.startswith("linux-image"))
KERNEL = "linux-image-amd64"  # depends on the release's newest; the cloud kernel has no soft-RoCE
_RECIPE = 2  # raise it when what is made of the packages changes, the archive in initramfs.py included
_APT_TIMEOUT = 300


class RigUnavailableError(Exception):
    """The rig cannot be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Packages:
    """Where the unpacked packages are."""

    tools: Path  # a root with qemu and the RDMA libraries
    kernel: Path  # a root with /boot and /lib/modules
    versions: dict[str, str]  # of all that was unpacked
    pins: dict[str, str]  # what was wanted of them

    @property
    def libraries(self) -> Path:
        return self.tools / "usr" / "lib" / "x86_64-linux-gnu"

    def describe(self) -> str:
        """Return the kernel's package and version, and what is of another version than is known to work."""
        kernel = {name: version for name, version in self.versions.items() if name.startswith("linux-image")}
        told = "rig: " + ", ".join(f"{name} {version}" for name, version in kernel.items())
        for name, wanted in self.pins.items():
            found = self.versions.get(name, "none")
            if found != wanted:
                told += f"; {name}: wanted {wanted}, which the archive does not have, found {found}"
        return told if self.pins else f"{told}; no versions are known to work on this release"

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
        return Packages(root / "tools", root / "kernel", json.loads((root / "versions").read_text()), _pins())
    except OSError as error:
        raise RigUnavailableError(f"cannot keep packages in {rig_cache()}: {error}") from error


def _key() -> str:
    return hashlib.sha256(repr((_RECIPE, TOOLS, KERNEL, _pins(), _release()["VERSION_ID"])).encode()).hexdigest()[:16]


def _pins() -> dict[str, str]:
    return PINS.get(_release().get("VERSION_ID", ""), {})


def _release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:  # some other Unix
        return {}


def _prepare(root: Path) -> None:
    debs = root / "debs"
    debs.mkdir(parents=True)
    _download_by_any_lists(root, debs)
    versions: dict[str, str] = {}
    for deb in sorted(debs.glob("*.deb")):
        kind = "kernel" if deb.name.startswith("linux-image") else "tools"
        subprocess.run(["dpkg-deb", "-x", deb, root / kind], check=True)
        show = ["dpkg-deb", "--show", "--showformat=${Package} ${Version}", str(deb)]
        name, version = subprocess.run(show, check=True, capture_output=True, text=True).stdout.split()
        versions[name] = version
    (root / "versions").write_text(json.dumps(versions))
    _merge_usr(root / "tools")
    shutil.rmtree(debs)


def _download_by_any_lists(root: Path, debs: Path) -> None:
    try:
        return _download(debs, [], _pins())
    except RigUnavailableError:
        pass
    # No package lists on this machine, or stale ones: fetch lists of our own.
    own = [f"-oDir::State::Lists={root}/lists", f"-oDir::Cache={root}/apt", "-oAPT::Sandbox::User=root"]
    (root / "lists" / "partial").mkdir(parents=True)
    (root / "apt" / "archives" / "partial").mkdir(parents=True)
    _apt(["apt-get", *own, "-qq", "update"], root)
    try:
        _download(debs, own, _pins())
    except RigUnavailableError:
        # Of other versions, which describe() tells; the kernel stays if it can.
        pins = {name: version for name, version in _pins().items() if name not in TOOLS}
        _download(debs, own, pins if _listed(debs, own, pins) else {})


def _download(folder: Path, options: list[str], pins: dict[str, str]) -> None:
    """Download the tools with all that they need beyond what is installed, and the kernel alone.

    Raises:
        RigUnavailableError: apt failed, or has not all versions of `pins`.
    """
    if not _listed(folder, options, pins):
        raise RigUnavailableError("the package lists have other versions")
    tools = [f"{name}={pins[name]}" if name in pins else name for name in TOOLS]
    flags = ("--reinstall", "--no-install-recommends", "--allow-downgrades")
    plan = _apt(["apt-get", *options, "-s", "install", *flags, *tools], folder)
    needed = sorted(set(re.findall(r"^Inst (\S+)", plan, re.MULTILINE)) - set(TOOLS))
    kernels = [f"{name}={version}" for name, version in pins.items() if name not in TOOLS]
    kernels = kernels or [_newest_kernel(folder, options)]
    _apt(["apt-get", *options, "-qq", "-oAPT::Sandbox::User=root", "download", *kernels, *tools, *needed], folder)


def _listed(folder: Path, options: list[str], pins: dict[str, str]) -> bool:
    """Return whether the package lists have all these versions."""
    if not pins:
        return True
    lines = _apt(["apt-cache", *options, "madison", *pins], folder).splitlines()
    listed = {tuple(part.strip() for part in line.split("|")[:2]) for line in lines}
    return set(pins.items()) <= listed


def _newest_kernel(folder: Path, options: list[str]) -> str:
    match = re.search(r"Depends: (linux-image-\S+)", _apt(["apt-cache", *options, "depends", KERNEL], folder))
    if match is None:
        raise RigUnavailableError(f"this release has no package {KERNEL}")
    return match[1]


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
        print(fetch_packages().describe())
    except RigUnavailableError as error:
        sys.exit(f"packages: {error}")
