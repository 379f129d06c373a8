# SPDX-License-Identifier: Apache-2.0
"""Environments of clients: one for each, as their requirements contradict each other, made of pinned versions.

python tests/shared/client_environments.py NAME ...    write the pins of these clients anew, by the newest versions
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from client_programs import PROGRAMS, Program

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "tests" / "e2e" / "clients"
_CACHE = Path(os.environ.get("BLINK_TEST_CLIENTS") or ROOT / "build" / "clients")
_UV = Path(sys.executable).with_name("uv")
_OLDEST = (3, 11)  # Python that all of them run on
_NO_NETWORK = (
    "dns error",
    "tcp connect error",
    "operation timed out",
    "ENOTFOUND",
    "EAI_AGAIN",
    "ETIMEDOUT",
)  # uv, npm


class UnavailableError(Exception):
    """An environment cannot be made here."""


def pins_of(program: Program) -> Path:
    """Return the file that pins all that a client needs."""
    return PINS / (f"{program.name}/package-lock.json" if program.is_node else f"{program.name}.txt")


def version_of(program: Program) -> str:
    """Return the pinned version of a client."""
    text = pins_of(program).read_text()
    if program.is_node:
        return json.loads(text)["packages"][f"node_modules/{program.client}"]["version"]
    match = re.search(rf"^{re.escape(program.client)}==([^\s;]+)", text, re.MULTILINE)
    assert match is not None, f"{program.client} is not pinned"
    return match[1]


def prepare(program: Program) -> Path:
    """Return the folder of a client's programs, after installing them if that was not done before.

    Raises:
        UnavailableError: a tool or a package is not to be had.
    """
    pins = pins_of(program)
    folder = _CACHE / f"{program.name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _install_node(pins.parent, folder) if program.is_node else _install_python(pins, folder)
        done.touch()
    return folder / ("node_modules/.bin" if program.is_node else "bin")


def write_pins(program: Program) -> None:
    """Resolve a client's requirements to the newest versions."""
    pins = pins_of(program)
    if program.is_node:
        pins.parent.mkdir(exist_ok=True)
        manifest = {"private": True, "dependencies": dict.fromkeys(program.packages, "latest")}
        (pins.parent / "package.json").write_text(json.dumps(manifest, indent=2) + "\n")
        pins.unlink(missing_ok=True)
        _run(["npm", "install", "--package-lock-only", "--omit-lockfile-registry-resolved"], pins.parent)
        return
    wanted = "\n".join(program.packages)
    command = [
        str(_UV),
        "pip",
        "compile",
        "--quiet",
        "--universal",
        f"--python-version={_OLDEST[0]}.{_OLDEST[1]}",
        "--no-annotate",
    ]
    command += ["--no-header", "--no-emit-index-url", "--no-emit-find-links", "--strip-extras", "-"]
    found = subprocess.run(command, input=wanted, capture_output=True, text=True, check=True).stdout
    pins.write_text("".join(line for line in found.splitlines(True) if not line.startswith(program.without)))


def _install_python(pins: Path, folder: Path) -> None:
    if not _UV.exists():
        raise UnavailableError("the extra 'clients' is not installed")
    if sys.version_info < _OLDEST:
        raise UnavailableError("clients are pinned for Python 3.11 or newer")
    _run([str(_UV), "venv", "--quiet", "--allow-existing", f"--python={sys.executable}", str(folder)])
    python = f"--python={folder / 'bin' / 'python'}"
    _run([str(_UV), "pip", "install", "--quiet", python, "--no-deps", f"--requirement={pins}"])


def _install_node(source: Path, folder: Path) -> None:
    if shutil.which("npm") is None:
        raise UnavailableError("needs Node.js with npm (Debian: apt install npm)")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(source / name, folder)
    _run(["npm", "ci", "--no-audit", "--no-fund"], folder)


def _run(command: Sequence[str], folder: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stdout + done.stderr
        if any(sign in said for sign in _NO_NETWORK):
            raise UnavailableError("needs a package index")
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {said[-2000:]}")


if __name__ == "__main__":
    for each in PROGRAMS:
        if each.name in sys.argv[1:]:
            write_pins(each)
            print(each.name, version_of(each))
