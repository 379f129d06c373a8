# SPDX-License-Identifier: Apache-2.0
"""What the scheduler does when the model or the scheduler itself breaks: stop, and say why."""

from __future__ import annotations

import pytest

from blink.region.layout import EngineState, ErrorCode, StepResult
from harness import Harness, running, small_config, submit

PROMPT = [3, 1, 4, 1, 5]


def launched(h: Harness) -> None:
    pair = h.frontend()
    for i in range(3):
        submit(h, pair, [*PROMPT, i], max_tokens=9)
    while h.step(finish=False) != StepResult.LAUNCHED:
        pass


def test_a_failed_step_stops_the_engine_with_its_code() -> None:
    with running(small_config()) as h:
        launched(h)
        step = int(h.batch[0]["step"])
        h.finish(failed=True)
        assert h.step() == StepResult.FAILED
        assert (h.engine_state, h.error_code) == (EngineState.FAILED, ErrorCode.STEP_FAILED)
        assert h.region.control_word("error_detail") == step
        assert h.step() == StepResult.FAILED, "a failed scheduler never goes on"


@pytest.mark.parametrize("token", [-1, 97, 2**31 - 1, -(2**31)])
def test_a_sampled_token_outside_the_vocabulary_stops_the_engine(token: int) -> None:
    with running(small_config()) as h:
        launched(h)
        h.state.array("sampled_tokens", "i4")[1] = token
        h.finish()
        assert h.step() == StepResult.FAILED
        assert (h.engine_state, h.error_code) == (EngineState.FAILED, ErrorCode.SAMPLED_TOKEN_RANGE)
        assert h.region.control_word("error_detail") == 1


def test_the_stop_word_ends_the_scheduler_at_once_even_with_a_step_in_flight() -> None:
    with running(small_config()) as h:
        launched(h)
        h.region.store_control("stop", 1)
        assert h.step(finish=False) == StepResult.STOPPED
        assert h.engine_state == EngineState.STOPPED


def test_the_heartbeat_goes_on_while_a_step_is_in_flight() -> None:
    with running(small_config()) as h:
        launched(h)
        before = h.region.heartbeat()
        for _ in range(5):
            assert h.step(finish=False) == StepResult.BUSY
        assert h.region.heartbeat() == before + 5


def test_each_step_leaves_a_trace_record() -> None:
    with running(small_config()) as h:
        pair = h.frontend()
        submit(h, pair, PROMPT, max_tokens=3)
        rows: dict[int, tuple[int, int, int]] = {}
        for _ in range(6):
            if h.step() == StepResult.LAUNCHED:
                batch = h.batch[0]
                rows[int(batch["step"])] = (int(batch["num_rows"]), int(batch["num_tokens"]), h.now)
        assert [tokens for _, tokens, _ in rows.values()] == [5, 1, 1]
        for step, (num_rows, num_tokens, now) in rows.items():
            entry = h.region.trace()[step % len(h.region.trace())]
            assert (entry["step"], entry["num_rows"], entry["num_tokens"]) == (step, num_rows, num_tokens)
            assert entry["retired_ns"] == now
