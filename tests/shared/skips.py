# SPDX-License-Identifier: Apache-2.0
"""Why tests may be skipped: the reasons of tests/skips.txt, and which skips of a run have another one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "skips.txt"
_COMMENT = re.compile(r"(^|  )#.*")


def read_reasons(text: str) -> list[str]:
    """Return the reasons that a list has: a line each, `*` for any text, comments behind two spaces and `#`."""
    return [reason for line in text.splitlines() if (reason := _COMMENT.sub("", line).strip())]


def find_unlisted(reports: Iterable[object], reasons: Iterable[str]) -> list[str]:
    """Return name and reason of each skipped test or module whose reason is not listed."""
    listed = re.compile("|".join(map(_pattern, reasons)) or "(?!)", re.DOTALL)
    found = {
        f"{report.nodeid}: {reason}": None
        for report in reports
        if isinstance(report, pytest.TestReport | pytest.CollectReport) and report.skipped
        if not listed.fullmatch(reason := _reason_of(report))
    }
    return list(found)


def _pattern(reason: str) -> str:
    return ".*".join(map(re.escape, reason.split("*")))


def _reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return said.removeprefix("Skipped: ")
