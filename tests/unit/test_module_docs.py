# SPDX-License-Identifier: Apache-2.0
"""The opening lines of every source file are plain English: one short sentence first, and no long one after it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_prose import MAX_SENTENCE, list_phrases

from doc_pages import ROOT, count_words, list_sentences

MAX_FIRST = 25

_PACKAGE = ROOT / "src" / "blink"
_SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh"}

_DOCSTRING = re.compile(r'(?:#[^\n]*\n|\n)*r?"""(.*?)"""', re.DOTALL)
_COMMENT = re.compile(r"// SPDX[^\n]*\n(?:#pragma once\n|\n)*((?://[^\n]*\n)+)")
_DRAWING = re.compile(r"^    .*$", re.MULTILINE)  # a format or a picture


def read_opening(path: Path) -> str:
    """Return a file's docstring or first comment, without what is drawn in it."""
    text = path.read_text()
    if path.suffix == ".py":
        match = _DOCSTRING.match(text)
        return _DRAWING.sub("", match[1]) if match else ""
    match = _COMMENT.match(text)
    return _DRAWING.sub("", re.sub(r"^// ?", "", match[1], flags=re.MULTILINE)) if match else ""


def list_faults(opening: str) -> list[str]:
    """Return what is wrong with the opening of a file."""
    sentences = list_sentences(opening)
    if not sentences:
        return ["says nothing"]
    faults = [f"a long first sentence: {sentences[0]}"] if count_words(sentences[0]) > MAX_FIRST else []
    faults += [f"a long sentence: {each}" for each in sentences if count_words(each) > MAX_SENTENCE]
    return faults + [f"a phrase of our own: {phrase}" for phrase in list_phrases(opening)]


def list_sources() -> list[Path]:
    """Return the files of the product."""
    return [path for path in sorted(_PACKAGE.rglob("*")) if path.suffix in _SUFFIXES]


def test_every_file_opens_in_plain_english() -> None:
    sources = list_sources()
    faults = [f"{path.relative_to(_PACKAGE)}: {fault}" for path in sources for fault in list_faults(read_opening(path))]
    assert faults == [] and len(sources) > 400


@pytest.mark.parametrize(
    ("name", "text", "opening"),
    [
        (
            "a.py",
            '# SPDX-License-Identifier\n"""One.\n\n    drawn\n\nTwo."""\nx = """y"""\n',
            "One. Two.",
        ),
        ("a.py", "x = 1\n", ""),
        ("a.h", "// SPDX-License-Identifier: Apache-2.0\n// One.\n// Two.\n#pragma once\n// Three.\n", "One. Two."),
        ("a.h", "// SPDX-License-Identifier: Apache-2.0\n#pragma once\n\n// One.\n\n// Two.\n", "One."),
        ("a.cu", "// SPDX-License-Identifier: Apache-2.0\n#include <a>\n// One.\n", ""),
    ],
)
def test_an_opening_is_found(tmp_path: Path, name: str, text: str, opening: str) -> None:
    (tmp_path / name).write_text(text)
    assert " ".join(read_opening(tmp_path / name).split()) == opening


@pytest.mark.parametrize(
    ("opening", "fault"),
    [
        ("", "says nothing"),
        ("word " * 26, "a long first sentence"),
        ("Short. " + "word " * 31, "a long sentence"),
        ("It lies beside the table.", "a phrase of our own: beside"),
    ],
)
def test_faults_are_found(opening: str, fault: str) -> None:
    [found] = list_faults(opening)
    assert found.startswith(fault)


def test_a_short_opening_has_no_fault() -> None:
    assert list_faults("The scheduler's queue. " + "word " * 30) == []
