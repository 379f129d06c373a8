# SPDX-License-Identifier: Apache-2.0
"""Pages lead somewhere and show what works: links with their headings, command lines of blink, code in Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from blink.cli.main import COMMANDS, parse

_ROOT = Path(__file__).resolve().parents[2]
PAGES = [*_ROOT.glob("*.md"), *sorted((_ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(_ROOT)))


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in _FENCE.findall(page.read_text()) if language in languages]


def headings(page: Path) -> set[str]:
    """Return the names by which links reach a page's headings."""
    titles = re.findall(r"^#+ (.+)", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower()).replace(" ", "-") for title in titles
    }


def find_broken(text: str, page: Path) -> list[str]:
    """Return the links to headings that are not there."""
    links = re.findall(r"\]\(((?!https?:)[^)#\s]*)#([^)\s]+)\)", text)
    targets = [((page.parent / path).resolve() if path else page, name) for path, name in links]
    return [f"{path.name}#{name}" for path, name in targets if path.suffix == ".md" and name not in headings(path)]


def command_lines(script: str) -> Iterator[list[str]]:
    """Yield the words behind `blink` of each of its command lines."""
    for line in script.replace("\\\n", " ").splitlines():
        command = re.sub(r"\s# .*", "", line)
        words = shlex.split(command) if command.count("'") % 2 == 0 else []  # else a body of JSON begins or ends
        names = [Path(word).name for word in words]
        if "blink" in names and words[names.index("blink") + 1 :]:
            yield words[names.index("blink") + 1 :]


@each_page
def test_links_lead_to_headings(page: Path) -> None:
    assert find_broken(page.read_text(), page) == []


@each_page
def test_command_lines_are_such_that_blink_takes_them(page: Path) -> None:
    for script in blocks(page, "sh", "bash"):
        for words in command_lines(script):
            if words[0] in COMMANDS and "..." not in words:
                parse(words)


@each_page
def test_code_in_python_can_be_compiled(page: Path) -> None:
    for code in blocks(page, "python"):
        if not code.startswith("# src/"):  # a part of a file
            compile(code, str(page), "exec")


def test_what_is_wrong_is_found() -> None:
    page = _ROOT / "docs" / "flags.md"
    assert find_broken("[x](hub.md#no-such-heading)", page) == ["hub.md#no-such-heading"]
    [words] = command_lines("VAR=1 taskset -c 0-3 blink serve model \\\n  --no-such-flag  # says why")
    assert words == ["serve", "model", "--no-such-flag"]
    with pytest.raises(SystemExit):
        parse(words)
