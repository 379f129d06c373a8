# SPDX-License-Identifier: Apache-2.0
"""What a frontend that attacks the GPU's scheduler costs the clients of another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import blink.models
from neighbour import attack, run_server, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
_LARGE = Path(blink.models.__path__[0]) / "configs" / "llama-3-8b"


def test_an_attacker_changes_no_answer(tmp_path: Path) -> None:
    with run_server(tiny_model(tmp_path), "cuda") as (engine, frontend):
        attack(engine, frontend, 2, is_exact=True)


def test_an_attacker_doubles_the_99th_percentile_at_most() -> None:
    """Of a model that people serve; in 16 bits its tokens depend on who is beside them."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    with run_server([str(_LARGE), "--load-format=dummy", "--dtype=bfloat16"], "cuda") as (engine, frontend):
        assert attack(engine, frontend, 3, is_exact=False).growth <= 2
