# SPDX-License-Identifier: Apache-2.0
"""The docs site: every page is in its navigation, every link and anchor leads somewhere, and nothing is loaded from
other hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from doc_pages import DOCS, ROOT, list_anchors, list_pages, list_targets, name_of
from mkdocs_hooks import on_page_markdown

# Pages of the navigation that are not yet written: stand-ins take their names.
PENDING: set[str] = set()
_SECTIONS = ["Blink", "Start", "Use", "Operate", "How it works", "Contribute", "Benchmarks"]

each_page = pytest.mark.parametrize("page", list_pages(), ids=name_of)


def read_site() -> dict[str, Any]:
    """Return the site's configuration."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def list_entries(nav: list[Any]) -> Iterator[str]:
    """Return the pages of a navigation, in its order."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            yield from list_entries(value) if isinstance(value, list) else (value,)


def find_broken(text: str, folder: Path, docs: Path, pending: set[str]) -> list[str]:
    """Return the targets of a page in a folder that lead nowhere.

    docs: the pages' folder, in which pending ones would be. Of files elsewhere the site keeps the names alone.
    """
    broken: list[str] = []
    for target in list_targets(text):
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve()
        if re.match(r"[a-z]+:", path) or (docs in file.parents and str(file.relative_to(docs)) in pending):
            continue
        if not file.exists():
            broken.append(target)
        elif anchor and (not path or docs in file.parents):
            broken += [] if anchor in list_anchors(file.read_text() if path else text) else [target]
    return broken


def test_the_navigation_has_the_pages_once_each() -> None:
    nav = read_site()["nav"]
    entries = list(list_entries(nav))
    assert [next(iter(section)) for section in nav] == _SECTIONS
    assert len(entries) == len(set(entries))
    assert {name_of(page) for page in list_pages()} - set(entries) == set(), "add them to mkdocs.yml"
    assert [entry for entry in entries if not (DOCS / entry).exists() and entry not in PENDING] == []


@each_page
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert find_broken(page.read_text(), page.parent, DOCS, PENDING) == []


@each_page
def test_a_page_begins_with_its_title(page: Path) -> None:
    lines = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
    assert lines[0].startswith("# ")
    assert sum(line.startswith("# ") for line in lines) == 1


@pytest.mark.parametrize(
    "name", ["architecture", "scheduling", "protocol", "protocol-rdma", "execution-plan", "kernels", "sampler"]
)
def test_a_page_on_how_it_works_opens_with_a_picture(name: str) -> None:
    opening = (DOCS / f"{name}.md").read_text().split("\n## ", 1)[0]
    assert "```\n" in opening or "![" in opening


def test_a_plan_on_a_page_is_a_recorded_one() -> None:
    [shown] = re.findall(r"```text\n(.*?)```", (DOCS / "execution-plan.md").read_text(), re.DOTALL)
    assert shown in (ROOT / "tests" / "unit" / "plans" / "llama-3-8b-bf16.txt").read_text()


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# B\n\n## A `title`, of two_words\n\n```\n# code\n```\n")
    text = "# A\n[x](b.md) [x](b.md#a-title-of-two_words) [x](#a) [x](https://c.d/#e) ![x](c.svg) `[x](d.md)`"
    assert find_broken(text, tmp_path, tmp_path, set()) == ["c.svg"]
    assert find_broken("[x](b.md#code) [x](#b) [x](e.md#x)", tmp_path, tmp_path, {"e.md"}) == ["b.md#code", "#b"]


class _Page:
    """A page as mkdocs gives it to a hook."""

    def __init__(self, name: str) -> None:
        self.file, self.src_uri = self, name


def test_links_that_leave_the_docs_become_names() -> None:
    text = "[rules](../../CONTRIBUTING.md#tests), [a](../sampling.md), [b](../../NONE.md), ![c](../../LICENSE)"
    expected = text.replace("[rules](../../CONTRIBUTING.md#tests)", "rules (`CONTRIBUTING.md`)")
    assert on_page_markdown(text, page=_Page("contribute/index.md"), config={}) == expected


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from the pages and stand-ins for pending ones."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")
    for name in PENDING:
        if not (folder / "docs" / name).exists():
            (folder / "docs" / name).write_text("# Pending\n")
    settings = (ROOT / "mkdocs.yml").read_text()
    settings = settings.replace("hooks: [", f"hooks: [{ROOT}/")
    (folder / "mkdocs.yml").write_text(settings)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder / "site")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_the_site_builds_without_a_warning_and_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= len(list_pages())
    loaded = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\s\">]+)")
    styles = [*pages, *site.rglob("*.css")]
    foreign = {target for page in pages for target in loaded.findall(page.read_text())}
    foreign |= {target for style in styles for target in re.findall(r"@import[^;]*//[^;]+;", style.read_text())}
    assert foreign == set()
