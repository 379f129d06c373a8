# SPDX-License-Identifier: Apache-2.0
"""One run of the RDMA tests in a virtual machine, and what became of each."""

from __future__ import annotations

import atexit
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest

from packages import RigUnavailableError, fetch_packages
from vm import Machine, Outcome, shell_command

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_BUILD_TIMEOUT = 900  # seconds, on a machine that does much else; some seconds of a core


class GuestRun:
    """The selected tests in one machine, which boots behind the tests that run here meanwhile."""

    TIMEOUT = 3000.0  # seconds, for a machine that does much else; a few minutes are usual

    def __init__(self, items: list[pytest.Item]) -> None:
        self._names = sorted({item.name.partition("[")[0] for item in items})
        self._files = sorted({str(item.path) for item in items})  # an emulated processor is slow to load the others
        self._outcome: Future[Outcome] | None = None

    def begin(self, rig: Executor) -> None:
        """Let `rig` boot the machine."""
        self._outcome = rig.submit(self._run)

    def failure_of(self, name: str) -> str | None:
        """Return why a test failed, or None if it passed; skip where there can be no machine."""
        assert self._outcome is not None, "begin() was not called"
        try:
            outcome = self._outcome.result()
        except RigUnavailableError as error:
            pytest.skip(f"no virtual machine with RDMA: {error}")
        failure = read_report(outcome).get(name, f"the machine did not get to this test:\n{outcome.console[-4000:]}")
        return failure and f"{failure}\n{outcome.packages}\nkernel:\n{kernel_messages(outcome.console)}"

    def packages(self) -> str:
        """Return what the machine was made of, once it has ended; empty if there was none."""
        is_over = self._outcome is not None and self._outcome.done() and self._outcome.exception() is None
        return self._outcome.result().packages if is_over and self._outcome is not None else ""

    def _run(self) -> Outcome:
        return start_guest_tests(["-k", " or ".join(self._names), *self._files]).wait(self.TIMEOUT)


def start_guest_tests(tests: list[str], **machine: object) -> Machine:
    """Boot a machine that runs pytest on some tests; `machine` goes to Machine, `environment` to the tests."""
    environment = machine.pop("environment", {})
    assert isinstance(environment, dict)
    command = [
        "-m",
        "pytest",
        "-v",
        "--color=no",
        "--durations=0",
        *("-p", "no:cacheprovider", "-p", "pytest_timeout"),  # other plugins take an emulated processor seconds
        "--timeout=2900",  # a machine that takes so long is ended from outside
        f"--confcutdir={HERE}",  # nor are the whole suite's rules loaded: what is not wanted was deselected before
        "--basetemp=/run/tests",  # /tmp shows this machine's, where the tests here make and delete folders too
        "--junitxml=/run/report.xml",
    ]
    script = shell_command(
        [sys.executable, *command, *tests],
        {"BLINK_TEST_RDMA": "here", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **library_environment(), **environment},
        folder=ROOT,
    )
    return Machine(f"{script}\nstatus=$?\ncat /run/report.xml >&3\nexit $status", **machine)  # type: ignore[arg-type]


@functools.cache
def library_environment() -> dict[str, str]:
    """Build the RDMA library against the rig's libibverbs; return the variables that make Blink use it."""
    packages = fetch_packages()
    folder = Path(tempfile.mkdtemp(prefix="blink-verbs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    cmake = Path(sys.executable).with_name("cmake")
    configure = [
        str(cmake) if cmake.exists() else "cmake",
        *("-S", str(ROOT), "-B", str(folder), "-DBLINK_WERROR=ON"),
        f"-DIBVERBS_INCLUDE_DIR={packages.tools}/usr/include",
        f"-DIBVERBS_LIBRARY={packages.libraries}/libibverbs.so",
        f"-DBLINK_OUTPUT_DIR={folder}",
    ]
    for command in (configure, [configure[0], "--build", str(folder), "--target", "blink_verbs"]):
        result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    return {"BLINK_VERBS_LIBRARY": f"{folder}/libblink_verbs.so", "PYTHONPATH": str(ROOT / "src")}


def kernel_messages(console: str) -> str:
    """Return what the machine's kernel complained of: it may have ended a process."""
    return "\n".join(line for line in console.splitlines() if re.match(r"\[ *\d+\.\d+\]", line))[-4000:]


def read_report(outcome: Outcome) -> dict[str, str | None]:
    """Return each test's failure, or None, from a report in JUnit's format."""
    if not outcome.report.strip():
        return {}
    found: dict[str, str | None] = {}
    for case in ElementTree.fromstring(outcome.report).iter("testcase"):
        problems = [*case.findall("failure"), *case.findall("error"), *case.findall("skipped")]
        output = "".join(part.text or "" for name in ("system-out", "system-err") for part in case.findall(name))
        found[str(case.get("name"))] = (
            "\n".join([*(problem.text or str(problem.get("message")) for problem in problems), output[-4000:]])
            if problems
            else None
        )
    return found
