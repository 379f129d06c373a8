# SPDX-License-Identifier: Apache-2.0
"""A real headless Chromium: the distribution's, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Playwright's, which are not there where only the gate runs.
Browser = Any
Page = Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def run_browser() -> Iterator[Browser]:
    """A browser until the end; the test is skipped, with a reason, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    with sync_api.sync_playwright() as playwright:
        # Without its sandbox, as the tests may run as root; the only page it opens is ours.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
