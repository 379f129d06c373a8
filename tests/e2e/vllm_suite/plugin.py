# SPDX-License-Identifier: Apache-2.0
"""Plugin of pytest that runs vLLM's own tests, as they are in a checkout, against Blink.

    PYTHONPATH=tests/e2e/vllm_suite:tests/shared python -m pytest -p plugin --confcutdir=CHECKOUT/tests/... FILES

Environment: BLINK_VLLM_SUITE is the checkout; BLINK_VLLM_RESULTS, if set, a file that gets a JSON object: of each file
how many tests passed and were excluded, and the names of those that failed. BLINK_VLLM_ALL=1 excludes none.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import facade
import pytest
import tokenizers_of_models
import transformers

CHECKOUT = Path(os.environ["BLINK_VLLM_SUITE"]).resolve()
_HERE = Path(__file__).parent

facade.install(CHECKOUT)
transformers.AutoTokenizer.from_pretrained = tokenizers_of_models.find


def read_excluded() -> dict[str, str]:
    """Return the reason for each test, or each file, that is not run."""
    lines = (_HERE / "excluded.txt").read_text().splitlines()
    pairs = (line.split(" | ") for line in lines if line and not line.startswith("#"))
    return dict(pairs)


def find_reason(nodeid: str, excluded: dict[str, str]) -> str | None:
    """Return why a test is not run, by its own name, that of its function or that of its file."""
    names = nodeid, nodeid.partition("[")[0], nodeid.partition("::")[0]
    return next((excluded[name] for name in names if name in excluded), None)


class _Results:
    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = defaultdict(lambda: {"passed": 0, "failed": {}, "excluded": 0})

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        excluded = {} if os.environ.get("BLINK_VLLM_ALL") else read_excluded()
        left_out = [item for item in items if find_reason(item.nodeid, excluded)]
        for item in left_out:
            self.files[_file_of(item.nodeid)]["excluded"] += 1
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self.files[_file_of(report.nodeid)]
        # What vLLM fails and expects to fail is passed where it does not fail here.
        if report.failed and not report.longreprtext.startswith("[XPASS(strict)]"):
            text = report.longreprtext.strip().splitlines() or [""]
            entry["failed"].setdefault(report.nodeid, text[-1])
        elif report.when == "call":  # or skipped by itself, or failed as it expects
            entry["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.files[_file_of(report.nodeid)]["failed"][report.nodeid] = str(report.longrepr).splitlines()[-1]

    def pytest_sessionfinish(self) -> None:
        if path := os.environ.get("BLINK_VLLM_RESULTS"):
            Path(path).write_text(json.dumps(self.files, indent=1))


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    """Count."""
    config.pluginmanager.register(_Results())
