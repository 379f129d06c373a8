# SPDX-License-Identifier: Apache-2.0
"""Guards of the repository: the map is complete, files and functions stay small, headers and names follow the rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = _ROOT / "src" / "blink"
_CODE_SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh"}
_SOURCES = sorted(
    path
    for folder in ("src", "tests", "benchmarks")
    for path in (_ROOT / folder).rglob("*")
    if path.suffix in _CODE_SUFFIXES and "__pycache__" not in path.parts
)
_PYTHON = [path for path in _SOURCES if path.suffix == ".py"]
_PRODUCT = [path for path in _SOURCES if _PACKAGE in path.parents]

_MAX_PYTHON_FILE = 350
_MAX_NATIVE_FILE = 400
_MAX_FUNCTION = 50
_MAX_NATIVE_FUNCTION = 60
_NATIVE_FUNCTION = re.compile(
    r"^( *)(?!if|for|while|switch|namespace|struct|class|enum|else|do\b)\w.*\)[^;={\n]*\{\n(?s:.*?)^\1\}", re.MULTILINE
)
_VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "handler", "common", "misc"}


@dataclass(frozen=True, slots=True)
class Module:
    """What the guards ask of a Python file; its tree, which is large, is not kept."""

    has_docstring: bool
    long_functions: list[str]


@cache
def _read(path: Path) -> Module:
    tree = ast.parse(path.read_text())
    long = [
        f"{path.relative_to(_ROOT)}:{node.lineno} {node.name}: {lines}"
        for node in _definitions(tree.body)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > _MAX_FUNCTION
    ]
    return Module(ast.get_docstring(tree) is not None, long)


def _definitions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions among statements, however deep; expressions, most of a tree, are passed over."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for name in ("body", "orelse", "finalbody"):
            yield from _definitions(getattr(node, name, []))
        for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
            yield from _definitions(part.body)


def _relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(_ROOT)) for path in paths]


def test_architecture_names_only_files_that_exist_and_few_of_them_on_a_requests_way() -> None:
    text = (_ROOT / "docs" / "architecture.md").read_text()
    paths = re.compile(r"`([\w/-]+\.(?:py|h|cpp|cuh?))`")
    assert [name for name in paths.findall(text) if not (_PACKAGE / name).is_file()] == []
    steps = re.findall(r"^\d+\. .*\n(?:   .*\n)*", text.split("## A request's way", 1)[1], re.MULTILINE)
    assert len(steps) == 10
    assert [step for step in steps if not 1 <= len(paths.findall(step)) <= 3] == []


def test_readme_links_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {link}"
        for page in _ROOT.glob("*.md")  # those of docs/: test_docs_site.py
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert broken == []


def test_no_file_is_longer_than_its_limit() -> None:
    long = [
        f"{path.relative_to(_ROOT)}: {lines}"
        for path in _PRODUCT
        if (lines := len(path.read_text().splitlines()))
        > (_MAX_PYTHON_FILE if path.suffix == ".py" else _MAX_NATIVE_FILE)
    ]
    assert long == []


def test_no_function_is_longer_than_its_limit() -> None:
    long = [function for path in _PYTHON for function in _read(path).long_functions]
    assert long == []


def test_no_native_function_is_longer_than_its_limit() -> None:
    long = [
        f"{path.relative_to(_ROOT)}: {match[0].splitlines()[0].strip()}"
        for path in _PRODUCT
        if path.suffix != ".py"
        for match in _NATIVE_FUNCTION.finditer(path.read_text())
        if len(match[0].splitlines()) > _MAX_NATIVE_FUNCTION
    ]
    assert long == []


def test_every_source_opens_with_its_licence() -> None:
    lacking = [path for path in _SOURCES if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:80]]
    assert _relative(lacking) == []


def test_every_module_says_what_it_is() -> None:
    lacking = [path for path in _PYTHON if not _read(path).has_docstring]
    assert _relative(lacking) == []


def test_no_module_has_a_vague_name() -> None:
    vague = [path for path in _SOURCES if _VAGUE_NAMES.intersection(path.stem.split("_"))]
    assert _relative(vague) == []


def test_nothing_is_left_to_do_in_the_product() -> None:
    marked = [path for path in _PRODUCT if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", path.read_text())]
    assert _relative(marked) == []
