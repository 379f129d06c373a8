# SPDX-License-Identifier: Apache-2.0
"""docs/models.md lists what the registry of families has, and refuses what it says."""

from __future__ import annotations

import re

import pytest

from blink.models.families import FAMILIES
from model_page import PAGE, REFUSALS, Refusal, explain, render_page


def test_the_page_is_what_the_registry_says() -> None:
    assert PAGE.read_text() == render_page(PAGE.read_text()), "python tests/shared/model_page.py writes it anew"


def test_every_model_type_and_small_model_stands_on_the_page() -> None:
    """Whatever makes the tables: each name of the registry in a row of its own family."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for name, family in FAMILIES.items():
        [row] = [row for row in rows if row.startswith(f"| {family.title} |")]
        for known in (name, *family.also_known_as):
            assert f"`{known}`" in row
        models = row.split("|")[-2]
        assert re.search(r"`\w", models), f"{name} has no small model"


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: ", ".join(refusal.changes))
def test_what_the_page_calls_refused_is_refused_by_name(refusal: Refusal) -> None:
    assert "not supported" in explain(refusal)


def test_what_runs_is_not_called_refused() -> None:
    with pytest.raises(AssertionError, match="is not refused"):
        explain(Refusal({"hidden_act": "silu"}, ""))
