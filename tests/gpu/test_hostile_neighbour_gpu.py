# SPDX-License-Identifier: Apache-2.0
"""What a frontend that attacks the GPU's scheduler costs the clients of another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from neighbour import check_neighbour, run_server

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_an_attacker_changes_no_answer_and_doubles_the_99th_percentile_at_most(tmp_path: Path) -> None:
    with run_server(tmp_path, "cuda") as (engine, frontend):
        check_neighbour(engine, frontend)
