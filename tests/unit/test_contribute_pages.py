# SPDX-License-Identifier: Apache-2.0
"""The pages for contributors stay true: paths exist, lists name the files that a search finds, code is the code.

A list of files follows a comment `<!-- files: REGEX -->`: its items begin with the paths of all files under src/
that the regex occurs in. A block of code whose first line is a comment with a path under src/ stands in that file.
`NAME` in a path stands for a name to choose.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = sorted((_ROOT / "docs" / "contribute").glob("*.md"))
_RECIPES = [page for page in _PAGES if page.name != "index.md"]
_SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh", ".json"}
_PATH = re.compile(r"`((?:src|tests|docs|benchmarks)/[^`\s]*)`")
_LIST = re.compile(r"<!-- files: (.+) -->\n\n((?:- .*\n(?:  .*\n)*)+)")
_CODE = re.compile(r"```\w+\n(?:#|//) (src/\S+)\n(.*?)```", re.DOTALL)

each_page = pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)


@cache
def read_sources() -> dict[str, str]:
    """Return the text of all files of the product."""
    files = (path for path in (_ROOT / "src").rglob("*") if path.suffix in _SUFFIXES)
    return {str(path.relative_to(_ROOT)): path.read_text() for path in files}


def list_faults(text: str, sources: dict[str, str]) -> list[str]:
    """Return what a page says that is not so."""
    known = [path for path in _PATH.findall(text) if "NAME" not in path]
    faults = [f"{path} does not exist" for path in known if not (_ROOT / path).exists()]
    for pattern, items in _LIST.findall(text):
        named = [_PATH.findall(line)[0] for line in items.splitlines() if line.startswith("- ")]
        found = {name for name, source in sources.items() if re.search(pattern, source)}
        faults += [f"{path} is listed, and has no {pattern}" for path in named if path not in found]
        faults += [f"{path} has {pattern}, and is not listed" for path in sorted(found.difference(named))]
    faults += [
        f"{path} has no such lines: {code}" for path, code in _CODE.findall(text) if code not in sources.get(path, "")
    ]
    return faults


def test_there_are_pages() -> None:
    assert _RECIPES


@each_page
def test_a_page_says_what_is_so(page: Path) -> None:
    assert list_faults(page.read_text(), read_sources()) == []


@pytest.mark.parametrize("page", _RECIPES, ids=lambda page: page.name)
def test_a_page_has_a_list_and_is_short(page: Path) -> None:
    text = page.read_text()
    assert _LIST.search(text)
    assert len(text.splitlines()) <= 150
    for path in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / path).exists(), path


WRONG = """<!-- files: Apple -->

- `src/a.py`: it,
  at length.
- `src/c.py`: none.

```python
# src/a.py
size = 2
```
"""
RIGHT = WRONG.replace("src/c.py", "src/b.py").replace("size = 2", "size = 1")


def test_a_page_that_is_wrong_is_found_out() -> None:
    sources = {"src/a.py": "class Apple:\n    size = 1\n", "src/b.py": "eat(Apple)\n"}
    absent = ["src/a.py does not exist", "src/c.py does not exist"]
    assert list_faults(WRONG, sources) == [
        *absent,
        "src/c.py is listed, and has no Apple",
        "src/b.py has Apple, and is not listed",
        "src/a.py has no such lines: size = 2\n",
    ]
    assert list_faults(RIGHT, sources) == [absent[0], absent[1].replace("c.py", "b.py")]
