# SPDX-License-Identifier: Apache-2.0
"""A test may be skipped for a listed reason only, with pytest-xdist and without."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from skips import LIST, find_unlisted, read_reasons
from suite_rules import run_pytest

_ROOT = LIST.parents[1]
_LISTED = "needs a CUDA GPU"
_MODULE = """
import pytest

def test_that_passes():
    pass

@pytest.mark.skip({mark!r})
def test_that_is_marked():
    pass

def test_that_skips_itself():
    pytest.skip({call!r})

@pytest.mark.xfail(reason="is known to fail")
def test_that_is_expected_to_fail():
    raise ValueError
"""
_SKIPPED_MODULE = "import pytest\npytest.skip({module!r}, allow_module_level=True)\n"


def run_modules(folder: Path, *flags: str, **reasons: str) -> subprocess.CompletedProcess[str]:
    """Run two small modules under the rules of this suite, each of whose skips has a reason of its own."""
    (folder / "test_some.py").write_text(_MODULE.format(**reasons))
    (folder / "test_other.py").write_text(_SKIPPED_MODULE.format(**reasons))
    return run_pytest(folder, *flags)


@pytest.mark.parametrize("flags", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_run_fails_with_every_skip_of_an_unlisted_reason_by_name(tmp_path: Path, flags: tuple[str, ...]) -> None:
    run = run_modules(tmp_path, *flags, mark="no mood", call=_LISTED, module="no time")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert "1 passed, 3 skipped, 1 xfailed" in run.stdout
    section = run.stdout.partition("skipped for a reason that is not in tests/skips.txt")[2]
    named = [line.rpartition("/")[2] for line in section.partition("\n===")[0].splitlines()[1:] if line]
    assert sorted(named) == ["test_other.py: no time", "test_some.py::test_that_is_marked: no mood"]


def test_a_run_whose_skips_are_listed_passes(tmp_path: Path) -> None:
    run = run_modules(tmp_path, mark=_LISTED, call="neon is not here", module="CUDA C++")
    assert run.returncode == 0, run.stdout
    assert "tests/skips.txt" not in run.stdout


def skip(reason: str) -> pytest.TestReport:
    place = ("file.py", 1, f"Skipped: {reason}")
    return pytest.TestReport("file.py::test_it", ("file.py", 1, ""), {}, "skipped", place, "setup")


@pytest.mark.parametrize(
    ("reason", "is_listed"),
    [
        ("needs a moon", True),
        ("needs a moon and a sun", False),
        ("it needs a moon", False),
        ("rocket: not (yet) ready", True),
        ("rocket: not (yet) built\nand lost", True),
        ("rocket: not yet", False),
        ("", False),
    ],
)
def test_a_reason_is_listed_as_a_whole_or_by_a_pattern(reason: str, is_listed: bool) -> None:
    reasons = read_reasons("# reasons\n\nneeds a moon  # there is one\nrocket: not (yet) *\n")
    assert reasons == ["needs a moon", "rocket: not (yet) *"]
    assert find_unlisted([skip(reason)] * 2, reasons) == ([] if is_listed else [f"file.py::test_it: {reason}"])
    assert find_unlisted([skip(reason)], []) == [f"file.py::test_it: {reason}"]


def test_every_listed_reason_is_one_that_is_given() -> None:
    files = [path for folder in ("tests", "src/blink") for path in (_ROOT / folder).rglob("*.py")]
    sources = "\n".join(path.read_text() for path in files if path != Path(__file__))
    unused = [
        reason for reason in read_reasons(LIST.read_text()) if max(reason.split("*"), key=len).strip() not in sources
    ]
    assert unused == []
