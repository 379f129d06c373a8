# SPDX-License-Identifier: Apache-2.0
"""Every message on the pages of troubleshooting is one that Blink writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = "".join(page.read_text() for page in sorted((_ROOT / "docs").glob("troubleshooting*.md")))
_VARIES = "..."
# A cell that begins with a message, perhaps after a status.
MESSAGES = re.findall(r"^\| (?:\d{3} )?`([^`]+ [^`]+)`", _PAGES, re.MULTILINE)


@cache
def literals() -> tuple[str, ...]:
    """Return the texts in the code, each with dots for what varies; adjacent ones are one."""
    trees = (ast.parse(path.read_text()) for path in (_ROOT / "src" / "blink").rglob("*.py"))
    return tuple(text for tree in trees for node in ast.walk(tree) for text in texts_of(node))


def texts_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else _VARIES for part in node.values)


def is_written(message: str) -> bool:
    """Tell whether the parts of a message stand in texts of the code."""
    parts = [part.strip() for part in message.split(_VARIES)]
    return all(not re.search(r"\w", part) or any(part in text for text in literals()) for part in parts)


def test_there_are_messages() -> None:
    assert len(MESSAGES) >= 40


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_stands_in_the_code(message: str) -> None:
    assert is_written(message)


def test_a_message_that_is_none_is_found() -> None:
    assert not is_written("the engine of ... has no such words")
