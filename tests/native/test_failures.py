# SPDX-License-Identifier: Apache-2.0
"""What the scheduler does when the model or the scheduler itself breaks: stop, and say why."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

import blink
from blink.engine.conclusion import conclude
from blink.link.queue_pair import KvOrigin
from blink.region.layout import CONSTANTS, EngineState, ErrorCode, StepResult, place_name
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from conftest import Compile
from harness import MILLISECOND, Harness, Inbox, Step, run_until_finished, running, small_config, submission, submit
from test_adapters import Host

CSRC = Path(blink.__file__).parent / "csrc"
PROMPT = [3, 1, 4, 1, 5]
Break = Callable[[Harness], int]  # leaves a scheduler whose next pass fails; returns the detail of its error


def launched(h: Harness) -> None:
    pair = h.frontend()
    for i in range(3):
        submit(h, pair, [*PROMPT, i], max_tokens=9)
    while h.step(finish=False) != StepResult.LAUNCHED:
        pass


def launched_step(h: Harness) -> int:
    launched(h)
    h.finish(failed=1)
    return int(h.batch[0]["step"])


def a_lost_rank(h: Harness) -> int:
    launched(h)
    h.finish(failed=CONSTANTS["first_lost_rank"] + 3)
    return 3


def a_token_beyond_the_vocabulary(h: Harness) -> int:
    launched(h)
    h.step_array("sampled_tokens", "i4")[2] = 97
    h.finish()
    return 2


def promised_blocks(h: Harness) -> int:
    """Count blocks as evictable that are not there: a prompt of three blocks is let in."""
    submit(h, h.frontend(), PROMPT * 4, cached=False)
    h.scheduler["num_free_blocks"], h.scheduler["num_evictable"] = 0, 8
    return 3


def a_promised_block_for_the_next_token(h: Harness) -> int:
    """The same when the step in flight fills a sequence's first block."""
    submit(h, h.frontend(), [*PROMPT, 9], cached=False)
    while int(h.sequences[0]["num_computed"]) < 7:
        h.step()
    h.scheduler["num_free_blocks"], h.scheduler["num_evictable"] = 0, 8
    return 0


def a_lost_reference(h: Harness) -> int:
    pair = h.frontend()
    sequence = submit(h, pair, PROMPT)
    h.step()
    h.step()
    block = int(h.state.array("block_tables", "i4")[int(h.sequences[0]["slot"]) * int(h.geometry["max_blocks"])])
    h.state.array("ref_counts", "u4")[block] = 0
    pair.cancel(sequence)
    return block


def a_lost_hash(h: Harness) -> int:
    """Let a sequence leave a cached block, lose that in the table, and admit a prompt that needs all blocks."""
    pair = h.frontend()
    run_until_finished(h, Inbox(), [pair], [submit(h, pair, PROMPT * 2, max_tokens=2)])
    (block,) = h.state.array("block_hashed", "u4").nonzero()[0]
    h.state.array("hash_table", "u4")[:] = 0
    submit(h, pair, [7] * 62, cached=False)
    return int(block)


BREAKS: list[tuple[ErrorCode, Break]] = [
    (ErrorCode.STEP_FAILED, launched_step),
    (ErrorCode.RANK_LOST, a_lost_rank),
    (ErrorCode.SAMPLED_TOKEN_RANGE, a_token_beyond_the_vocabulary),
    (ErrorCode.FREE_LIST_CORRUPT, promised_blocks),
    (ErrorCode.FREE_LIST_CORRUPT, a_promised_block_for_the_next_token),
    (ErrorCode.REF_COUNT_CORRUPT, a_lost_reference),
    (ErrorCode.HASH_TABLE_CORRUPT, a_lost_hash),
]


def check_failure(h: Harness, step: Step, code: ErrorCode, detail: int) -> None:
    """Run passes until one fails, and check what it leaves: the code, its detail and the line that reported it."""
    for _ in range(5):
        h.now += MILLISECOND
        if step(h.state.address, h.now) == StepResult.FAILED:
            break
        h.finish()
    assert step(h.state.address, h.now) == StepResult.FAILED, "a failed scheduler never goes on"
    assert (h.engine_state, h.error_code) == (EngineState.FAILED, code)
    assert h.region.control_word("error_detail") == detail
    name, line = place_name(h.region.control_word("error_place")).split(":")
    (path,) = CSRC.rglob(name)
    native = "k" + code.name.title().replace("_", "")
    assert f"ErrorCode::{native}" in path.read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize(("code", "break_"), BREAKS)
def test_a_broken_invariant_stops_the_engine_and_says_what_and_where(code: ErrorCode, break_: Break) -> None:
    with running(small_config(), num_blocks=8) as h:
        detail = break_(h)
        check_failure(h, lib.blink_step, code, detail)


def test_a_launch_that_fails_stops_the_engine(compile_native: Compile) -> None:
    library = ctypes.CDLL(str(compile_native("no_launch.cpp", "-shared", "-fPIC")))
    library.no_launch_step.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    with running(small_config()) as h:
        submit(h, h.frontend(), PROMPT)
        check_failure(h, library.no_launch_step, ErrorCode.LAUNCH_FAILED, detail=int(h.geometry["num_decode_graphs"]))


def test_a_copy_of_an_adapter_that_fails_stops_the_engine(compile_native: Compile) -> None:
    library = ctypes.CDLL(str(compile_native("no_launch.cpp", "-shared", "-fPIC")))
    library.no_launch_step.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    with running(small_config(), num_adapters=3, num_adapter_slots=1) as h:
        pair, adapter = h.frontend(), Host(h).load(1, content=1)
        pair.submit(submission(PROMPT)._replace(origin=KvOrigin(variant=adapter.variant)), SamplingParams(max_tokens=4))
        h.step()
        check_failure(h, library.no_launch_step, ErrorCode.LAUNCH_FAILED, detail=adapter.index)
        assert place_name(h.region.control_word("error_place")).startswith("adapter_paging.h:")


def test_the_engine_logs_the_error_with_its_place_and_exits_with_1(caplog: pytest.LogCaptureFixture) -> None:
    with running(small_config()) as h:
        launched_step(h)
        h.step()
        assert conclude(h.region) == 1
        place = place_name(h.region.control_word("error_place"))
        assert place.startswith("scheduler.h:")
        assert f"STEP_FAILED ({place}, detail {h.region.control_word('error_detail')})" in caplog.text


def test_every_error_is_provoked() -> None:
    assert {ErrorCode.NONE, ErrorCode.LAUNCH_FAILED, *(code for code, _ in BREAKS)} == set(ErrorCode)


@pytest.mark.parametrize("token", [-2, 97, 2**31 - 1, -(2**31)])
def test_a_sampled_token_outside_the_vocabulary_stops_the_engine(token: int) -> None:
    with running(small_config()) as h:
        launched(h)
        h.step_array("sampled_tokens", "i4")[1] = token
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
