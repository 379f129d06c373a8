# SPDX-License-Identifier: Apache-2.0
"""Ratchets: counts of what the product has too much of. A change may lower a count, and then lowers it here too."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).resolve().parents[2] / "src" / "blink"
_MODELS = ("kernels", "models", "formats", "plan", "runner")


def nodes_of(*rooms: str) -> Iterator[ast.AST]:
    """Yield every node of the Python files of some rooms; without any, of all."""
    for room in rooms or ("",):
        for path in sorted((_PACKAGE / room).rglob("*.py")):
            yield from nodes_in(path)


@cache
def nodes_in(path: Path) -> list[ast.AST]:
    """Return every node of a file, which every count looks through."""
    return [*ast.walk(ast.parse(path.read_text()))]


def count_isinstance() -> int:
    """Count the questions for a type where kernels are chosen and models read."""
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        for node in nodes_of(*_MODELS)
    )


def count_cache_shapes() -> int:
    """Count where the shape of a KV cache is read, whose numbers have names in LayerCache."""
    files = (path for path in sorted(_PACKAGE.rglob("*.py")) if path.name != "layer_cache.py")
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr == "shape"
        and re.search(r"cache|cells|\bkv\b", ast.unparse(node.value)) is not None
        for path in files
        for node in nodes_in(path)
    )


def count_structures() -> int:
    """Count the mirrors of native structures that are written by hand."""
    return sum(
        isinstance(node, ast.Attribute) and node.attr == "Structure" and ast.unparse(node) == "ctypes.Structure"
        for node in nodes_of()
    )


def count_files_of_a_format() -> int:
    """Count the files outside of formats/ that name one number format: its kernels may."""
    files = (path for path in _PACKAGE.rglob("*.py") if "formats" not in path.relative_to(_PACKAGE).parts)
    return sum("mxfp4" in path.read_text().lower() for path in files)


def count_inner_imports() -> int:
    """Count the imports that stand inside of functions."""
    functions = (node for node in nodes_of() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    inner = {
        node for function in functions for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return len(inner)


def count_asserts_of_api() -> int:
    """Count the asserts of the API that do more than narrow a type: `python -O` leaves them out."""
    tests = (ast.unparse(node.test) for node in nodes_of("api") if isinstance(node, ast.Assert))
    return sum(not (test.startswith("isinstance(") or test.endswith(" is not None")) for test in tests)


def count_stubs_of_api() -> int:
    """Count the functions of the API that only raise NotImplementedError."""
    return sum(
        isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise NotImplementedError")
        for node in nodes_of("api")
    )


# A number of tokens compared with 1, or with that of rows.
_GUESS = re.compile(
    r"\b(num_tokens|num_computed|scheduled)\s*([=!]=|[<>]=?)\s*1\b|rows\s*[=!]=\s*[\w.>-]*tokens\b|tokens\s*[=!]=\s*[\w.>-]*rows\b"
)


def count_guessed_kinds_of_rows() -> int:
    """Count where the scheduler guesses a row's kind from counts, which row.h alone may."""
    headers = sorted({*(_PACKAGE / "csrc" / "scheduler").glob("*.h")} - {_PACKAGE / "csrc" / "scheduler" / "row.h"})
    return sum(len(_GUESS.findall(path.read_text())) for path in headers)


@dataclass(frozen=True)
class Ratchet:
    """A count as it is, which may only fall, and as it is to be."""

    count: Callable[[], int]
    today: int
    end: int


RATCHETS = [
    Ratchet(count_isinstance, 11, 11),
    Ratchet(count_cache_shapes, 0, 0),
    Ratchet(count_structures, 6, 6),
    Ratchet(count_files_of_a_format, 1, 1),
    Ratchet(count_inner_imports, 16, 16),
    Ratchet(count_asserts_of_api, 0, 0),
    Ratchet(count_stubs_of_api, 0, 0),
    Ratchet(count_guessed_kinds_of_rows, 0, 0),
]


@pytest.mark.parametrize("ratchet", RATCHETS, ids=lambda ratchet: ratchet.count.__name__)
def test_a_count_only_falls(ratchet: Ratchet) -> None:
    found = ratchet.count()
    assert found <= ratchet.today, f"{ratchet.count.__doc__} There were {ratchet.today}, now there are {found}."
    assert found == ratchet.today, f"It fell: write {found} in RATCHETS."
    assert ratchet.end <= ratchet.today
