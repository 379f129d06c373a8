# SPDX-License-Identifier: Apache-2.0
"""What a frontend that attacks its engine costs the clients of another one: no token, and little time."""

from __future__ import annotations

from pathlib import Path

import pytest

from neighbour import attack, run_server, tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


def test_an_attacker_changes_no_answer_and_doubles_the_99th_percentile_at_most(tmp_path: Path) -> None:
    with run_server(tiny_model(tmp_path), "cpu") as (engine, frontend):
        assert attack(engine, frontend, 5, is_exact=True).growth <= 2
