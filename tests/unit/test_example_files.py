# SPDX-License-Identifier: Apache-2.0
"""Each example is short, says what it is for and how it is run, and stands in the table; a long test runs them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_module_docs import list_faults

from doc_pages import list_sentences, list_targets
from example_programs import FOLDER, list_examples

MAX_LINES = 60
PAGE = FOLDER / "README.md"

each_example = pytest.mark.parametrize("example", list_examples(), ids=lambda path: path.name)


def test_the_table_has_all_examples_and_each_link_leads_somewhere() -> None:
    targets = list_targets(PAGE.read_text())
    assert {path.name for path in list_examples()} <= {*targets}
    assert [target for target in targets if not (FOLDER / target).exists()] == []
    assert len(list_examples()) > 10


def test_the_page_is_plain_english() -> None:
    assert list_sentences(PAGE.read_text())
    assert list_faults(PAGE.read_text()) == []


@each_example
def test_an_example_is_short_and_says_how_it_is_run(example: Path) -> None:
    text = example.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert len(text.splitlines()) < MAX_LINES
    opening = ast.get_docstring(ast.parse(text)) or ""
    assert f"python examples/{example.name}" in opening
    assert list_faults(re.sub(r"^    .*$", "", opening, flags=re.MULTILINE)) == []
