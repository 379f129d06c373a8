# SPDX-License-Identifier: Apache-2.0
"""docs/clients.md names each tested client with the version that is pinned; each has a short program with its pins."""

from __future__ import annotations

import json
import re

import pytest

from client_environments import PINS, pins_of, version_of
from client_programs import FOLDER, PROGRAMS, Program
from doc_pages import DOCS
from parrot_model import DELAY
from pins import LONG, ROOT

MAX_LINES = 60
PAGE = (DOCS / "clients.md").read_text()
# Those whose tests are in this project's own environment.
IN_PLACE = ("openai", "anthropic", "instructor", "langchain-openai", "pydantic-ai-slim", "lm-eval")

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def versions_on_the_page() -> dict[str, str]:
    """Return the version that the table gives for each package."""
    return dict(re.findall(r"^\|[^|]*\(`([^`]+)`\) \| ([\w.]+) \|", PAGE, re.MULTILINE))


def test_the_page_names_the_pinned_versions() -> None:
    pinned = (ROOT / LONG).read_text()
    own = {name: re.search(rf"^{re.escape(name)}==(\S+)", pinned, re.MULTILINE) for name in IN_PLACE}
    expected = {name: match[1] for name, match in own.items() if match is not None}
    expected |= {program.client: version_of(program) for program in PROGRAMS}
    assert versions_on_the_page() == expected


def test_every_program_is_in_the_table_and_on_the_page() -> None:
    files = {program.file for program in PROGRAMS}
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == files
    assert {name for name in files if f"examples/clients/{name}" not in PAGE} == set()
    assert {path.stem for path in PINS.iterdir()} == {program.name for program in PROGRAMS}


@each_program
def test_a_program_is_short_and_says_how_it_is_run(program: Program) -> None:
    text = (FOLDER / program.file).read_text()
    opening = text.partition("import")[0] if program.file.endswith((".py", ".mjs")) else text
    assert "SPDX-License-Identifier: Apache-2.0\n" in text[:80]
    assert len(text.splitlines()) < MAX_LINES
    assert f"examples/clients/{program.file}" in opening and "blink serve" in opening
    assert program.client in opening


@each_program
def test_all_that_a_client_needs_is_pinned(program: Program) -> None:
    text = pins_of(program).read_text()
    if program.is_node:
        packages = json.loads(text)["packages"]
        assert all("version" in entry for name, entry in packages.items() if name)
        assert "://" not in "".join(str(entry.get("resolved", "")) for entry in packages.values())
        return
    lines = text.splitlines()
    assert [line for line in lines if not re.match(r"[\w.-]+==[\w.+!-]+( ; .+)?$", line)] == []
    assert {re.split(r"[\[=]", package)[0] for package in program.packages} <= {line.split("==")[0] for line in lines}


@each_program
def test_the_model_can_say_its_replies(program: Program) -> None:
    assert program.prints
    assert all(len(rule.say.encode()) < DELAY for rule in program.rules)
