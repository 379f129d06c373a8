# SPDX-License-Identifier: Apache-2.0
"""Applies each of tests/mutants.json, a wrong line, to a copy of the tree and runs its tests: they must fail.

python tests/shared/mutants.py [--jobs N] [WORD ...] runs those whose file, name or tests hold one of the words, N at a
time. A mutant that changes nothing that can be seen is listed with `equivalent`, the reason; then its tests must pass.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interpreted import SOME_CASES

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "mutants.json"
_NATIVE = "src/blink/csrc/"
_INTERPRETED = "tests/gpu/"
_TIMEOUT = 900  # seconds for the tests of one mutant, which may hang
_COPIED = ("src", "tests", "benchmarks", "docs", "deploy", "pyproject.toml", "CMakeLists.txt", "README.md", "Makefile")
_LEFT = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis")
# The checkout's editable install comes before PYTHONPATH; the copy must.
_SITE = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "ScikitBuildRedirectingFinder"]
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a file, and the tests that must notice it."""

    name: str
    file: str
    old: str  # stands once in the file
    new: str
    tests: tuple[str, ...]  # arguments of pytest; those of tests/gpu run in Triton's interpreter
    equivalent: str = ""

    @property
    def is_native(self) -> bool:
        return self.file.startswith(_NATIVE)


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """Return the listed mutants."""
    entries: list[dict[str, Any]] = json.loads(path.read_text())
    return [Mutant(tests=tuple(entry.pop("tests")), **entry) for entry in entries]


class Tree:
    """A copy of the tree, in which one mutant at a time lives."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "tree"
        for name in _COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, self.root / name, ignore=_LEFT, symlinks=True)
            elif (root / name).exists():
                shutil.copy(root / name, self.root / name)
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_SITE)
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.root / "src"), str(site)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def build(self) -> str | None:
        """Build the native library; return the compiler's complaint if that fails."""
        cmake = Path(sys.executable).with_name("cmake")
        program = str(cmake) if cmake.exists() else "cmake"
        # A warning is an error, as in tests that compile: what the compiler notices shows nothing of a test.
        configure = [program, "-S", ".", "-B", "build", "-DBLINK_WERROR=ON"]
        for command in (configure, [program, "--build", "build", "--target", "blink"]):
            done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return (done.stdout + done.stderr)[-2000:]
        return None

    def test(self, tests: tuple[str, ...]) -> tuple[int, str]:
        """Run tests until the first fails; return pytest's exit status (1: one failed) and what it printed."""
        interpreted = tuple(test for test in tests if test.startswith(_INTERPRETED))
        others = tuple(test for test in tests if test not in interpreted)
        status, output = self._run(others, {}) if others else (0, "")
        if status == 0 and interpreted:
            status, output = self._run(interpreted, SOME_CASES)
        return status, output

    def _run(self, tests: tuple[str, ...], more: Mapping[str, str]) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=self.root,
                env={**self._environment, **more},
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, "the tests hang"
        status = 1 if done.returncode < 0 else done.returncode  # by a signal: the mutant crashed them
        return status, (done.stdout + done.stderr)[-2000:]

    def judge(self, mutant: Mutant) -> str:
        """Return what is wrong with a mutant or its tests; nothing if they notice it as they should."""
        path = self.root / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"its old text stands {text.count(mutant.old)} times in the file"
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            if mutant.is_native and (complaint := self.build()):
                return f"it does not compile:\n{complaint}"
            status, output = self.test(mutant.tests)
        finally:
            path.write_text(text)
        if status not in (0, 1):
            return f"its tests cannot run:\n{output}"
        if mutant.equivalent:
            return "it is listed as equivalent, but a test fails:\n" + output if status else ""
        return "" if status else "it survives"


def judge_share(root: Path, mutants: list[Mutant]) -> list[str]:
    """Judge mutants in turn, in a tree of their own; return the names of those with which something is wrong."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="blink-mutants-") as folder:
        tree = Tree(root, Path(folder))
        if any(mutant.is_native for mutant in mutants) and (complaint := tree.build()):
            raise SystemExit(f"mutants: the tree does not build:\n{complaint}")
        tests = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
        status, output = tree.test(tests)
        if status != 0:
            raise SystemExit(f"mutants: the tests fail without any mutant:\n{output}")
        for mutant in mutants:
            verdict = tree.judge(mutant)
            print(f"{mutant.file}: {mutant.name}: {verdict or ('is equivalent' if mutant.equivalent else 'is caught')}")
            sys.stdout.flush()
            if verdict:
                wrong.append(mutant.name)
    return wrong


def run_mutants(root: Path, mutants: list[Mutant], jobs: int = 1) -> list[str]:
    """Judge mutants, `jobs` at a time; return the names of those with which something is wrong."""
    shares = [share for share in (mutants[first::jobs] for first in range(jobs)) if share]
    with ThreadPoolExecutor(len(shares) or 1) as pool:
        return [name for wrong in pool.map(judge_share, [root] * len(shares), shares) for name in wrong]


def main(arguments: list[str]) -> int:
    """Run the mutants that the words name, all without any; return how many are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="of a mutant's file, name or tests")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, each in a copy of the tree")
    options = parser.parse_args(arguments)
    mutants = [
        mutant
        for mutant in read_mutants()
        if not options.words
        or any(word in " ".join((mutant.name, mutant.file, *mutant.tests)) for word in options.words)
    ]
    wrong = run_mutants(ROOT, mutants, options.jobs)
    print(f"{len(mutants) - len(wrong)} of {len(mutants)} mutants are as they should be")
    return min(len(wrong), 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
