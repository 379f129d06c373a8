# SPDX-License-Identifier: Apache-2.0
"""A GPU engine is paused and goes on, by queue pair entries alone: its host process is stopped all the while."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from blink.region.layout import FinishReason
from engine_load import Load
from engine_process import connect, run_engine_process, stopped

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_paused_engine_launches_nothing_and_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    with run_engine_process(tmp_path, "--dtype=float32", "--num-gpu-blocks-override=4096") as (process, region):
        client = connect(region, process)
        whole = Load(client)
        whole.wait(whole.has_ended)
        with stopped(process):
            for mode in ("keep", "retract"):
                load = Load(client)
                load.wait(load.has_begun)
                seconds = load.pause(mode)
                load.drain()
                assert client.is_paused and not load.has_ended(), f"it ended before the pause came: {seconds} s"
                steps = client.stats()["num_steps"]
                start = time.monotonic()
                load.wait(lambda start=start: time.monotonic() > start + 0.5)
                assert client.stats()["num_steps"] == steps
                load.resume()
                load.wait(load.has_ended)
                assert [*load.tokens.values()] == [*whole.tokens.values()]
                print(f"{mode}: acknowledged after {seconds * 1e3:.2f} ms")
            load = Load(client)
            load.wait(load.has_begun)
            load.pause("abort")
            load.wait(load.has_ended)
            assert {*load.reasons.values()} == {FinishReason.ABORT}
            load.resume()
        client.close()
