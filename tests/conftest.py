# SPDX-License-Identifier: Apache-2.0
"""Rules of the whole suite: GPU tests are skipped, with a reason, where there is no GPU; long ones wait for --long.

A skip for a reason that is not in tests/skips.txt fails the run.
"""

from __future__ import annotations

import gc
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import blink.engine  # noqa: F401  # pyright: ignore[reportUnusedImport]  (sets OpenMP before a test loads torch)
from blink.kernels.rounding import EXACT, begin_step
from early import begin_all, begin_early
from groups import MACHINE, WAITING, group_of
from skips import LIST, find_unlisted, read_reasons

if TYPE_CHECKING:
    from xdist.remote import Producer

    from group_scheduling import GroupScheduling

# An example takes as long as a busy machine lets it.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

gc.disable()  # until all is collected: little of that is garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests that take minutes too, as `make test-all` does")


@pytest.hookimpl(tryfirst=True)  # what is deselected here, nobody prepares for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long") and (long := [item for item in items if item.get_closest_marker("long")]):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if lack := _lack_of_gpu():
        skip = pytest.mark.skip(reason=lack)
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """Let each file's tests run in one process, and all that wait for servers and programs in the same one."""
    from group_scheduling import GroupScheduling  # with pytest-xdist, which single processes do without

    return GroupScheduling(config, log)


def pytest_collection_finish() -> None:
    """Let no collection of garbage look through what modules and tests are made of, which takes a second."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free what a file's tests have left, and let no later collection look through what they have loaded.

    A collection takes a second with all of that. Products that collect, such as an engine that falls asleep, then do so
    in a moment.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries complain of what is left at the end


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        for item in session.items:
            if item.get_closest_marker("early"):
                assert isinstance(item, pytest.Function)
                begin_early(session.config, item.module.begin)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Begin before the first test what selected tests will wait for, so that it works on while other tests wait."""
    is_alone = not hasattr(item.config, "workerinput")
    if is_alone or group_of(item.nodeid) == WAITING:
        begin_all(item.config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a test was skipped for a reason that is not listed; xdist's workers leave it to their controller."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.exitstatus == pytest.ExitCode.OK and _unlisted_skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the skips that fail the run, and what virtual machines were made of, whatever became of their tests."""
    if unlisted := _unlisted_skips(terminalreporter):
        terminalreporter.section("skipped for a reason that is not in tests/skips.txt", red=True, bold=True)
        for line in unlisted:
            terminalreporter.write_line(line)
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    properties = [each for report in reports for each in getattr(report, "user_properties", ())]
    for line in sorted({value for name, value in properties if name == MACHINE and value}):
        terminalreporter.write_line(line)


def _unlisted_skips(reporter: pytest.TerminalReporter) -> list[str]:
    return find_unlisted(reporter.stats.get("skipped", []), read_reasons(LIST.read_text()))


def _lack_of_gpu() -> str:
    if not Path("/dev/nvidiactl").exists():
        return "needs an NVIDIA GPU: there is no /dev/nvidiactl"
    if version("torch").endswith("+cpu"):
        return "needs torch for CUDA: make test-gpu installs it"
    return ""


@pytest.fixture(autouse=True)
def _rounds_nothing() -> None:
    """Let no test have what an earlier one's engine left in this thread: what GEMMs of its last step may round."""
    begin_step(EXACT, 0, 0)
