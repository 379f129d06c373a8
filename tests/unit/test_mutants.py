# SPDX-License-Identifier: Apache-2.0
"""The list of wrong lines fits the tree, and the program that tries them tells a survivor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from interpreted import TESTS as INTERPRETED
from mutants import ROOT, Mutant, Tree, read_mutants, run_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_listed_line_stands_once_in_its_file_and_its_tests_exist(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1 and mutant.old != mutant.new
    assert mutant.tests and all((ROOT / test.partition("::")[0]).is_file() for test in mutant.tests)


def test_a_kernel_has_tests_that_the_gate_runs_in_the_interpreter_too() -> None:
    interpreted = {test for mutant in MUTANTS for test in mutant.tests if test.startswith("tests/gpu/")}
    assert interpreted and interpreted <= set(INTERPRETED)


def test_each_test_runs_where_it_is_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[tuple[str, ...], str]] = []

    def note(_: Tree, tests: tuple[str, ...], more: Mapping[str, str]) -> tuple[int, str]:
        ran.append((tests, more.get("TRITON_INTERPRET", "")))
        return (1, "") if "tests/unit/wrong.py" in tests else (0, "")

    monkeypatch.setattr(Tree, "_run", note)
    tree = Tree(tmp_path / "none", tmp_path)
    assert tree.test(("tests/gpu/a.py", "tests/unit/b.py")) == (0, "")
    assert tree.test(("tests/gpu/a.py", "tests/unit/wrong.py")) == (1, "")
    assert ran == [(("tests/unit/b.py",), ""), (("tests/gpu/a.py",), "1"), (("tests/unit/wrong.py",), "")]


def test_random_tests_run_in_a_tree(tmp_path: Path) -> None:
    """Those of Hypothesis, which refuses settings that it does not know: each mutant would look caught."""
    root, copy = tmp_path / "root", tmp_path / "copy"
    (root / "tests").mkdir(parents=True)
    copy.mkdir()
    text = (
        "from hypothesis import given, strategies as st\n\n@given(st.booleans())\ndef test_it(value):\n    assert value"
    )
    (root / "tests" / "test_it.py").write_text(f"{text} in (True, False)\n")
    assert Tree(root, copy).test(("tests/test_it.py",))[0] == 0


def test_names_are_told_apart() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def play_tests(tree: Tree, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run the one test in this process."""
    sizes: dict[str, Callable[..., int]] = {}
    exec((tree.root / tests[0]).read_text(), sizes)
    return int(not (sizes["larger"](1, 2) == 2 and sizes["least"]() > 1)), ""


def test_survivors_are_told_and_the_tree_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    file = "src/sizes.py"
    text = "def larger(a, b):\n    return a if a > b else b\n\n\ndef least():\n    return 3\n"
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(Tree, "test", play_tests)
    mutants = [
        Mutant("caught", file, "a > b", "a < b", (file,)),
        Mutant("equivalent", file, "a > b", "a >= b", (file,), "of equals either will do"),
        Mutant("survivor", file, "return 3", "return 2", (file,)),
        Mutant("not equivalent", file, "return 3", "return 1", (file,), "so it was thought"),
        Mutant("stale", file, "return 4", "return 1", (file,)),
    ]
    assert run_mutants(tmp_path, mutants) == ["survivor", "not equivalent", "stale"]
    told = capsys.readouterr().out
    assert "caught: is caught" in told and "survivor: it survives" in told and "stands 0 times" in told
    assert (tmp_path / file).read_text() == text
    with pytest.raises(SystemExit, match="without any mutant"):
        (tmp_path / file).write_text(text.replace("a > b", "a < b"))
        run_mutants(tmp_path, mutants[:1])
