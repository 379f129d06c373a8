# SPDX-License-Identifier: Apache-2.0
"""Frontends that are slow, die, are succeeded or break the protocol, and the others beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blink.errors import OverloadedError
from blink.region.layout import (
    COMPLETION,
    CONSTANTS,
    CQE,
    SAMPLING,
    SQE,
    CqeKind,
    EngineState,
    FinishReason,
    Opcode,
    RejectCode,
    StepResult,
)
from blink.region.memory import QueuePairAddresses
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from blink.sampling_ranges import SAMPLING_RANGES
from harness import (
    Completion,
    Harness,
    Inbox,
    QueuePair,
    Step,
    expected_tokens,
    run_until_finished,
    running,
    small_config,
    submission,
    submit,
)

VOCAB = 97
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
LEASE_MS = 5000


def live_of(h: Harness, index: int) -> int:
    tags = int(h.geometry["sequences_per_queue_pair"])
    return int((h.sequences["status"][index * tags : (index + 1) * tags] != 0).sum())


def store(h: Harness, pair: QueuePair, index: int, word: str, value: int) -> None:
    pair._link.store_word(getattr(QueuePairAddresses(h.region, index), word), value)


def test_a_full_completion_queue_loses_and_repeats_nothing() -> None:
    with running(small_config(), cq_entries=16) as h:
        pair, inbox = h.frontend(), Inbox()
        sequences = [submit(h, pair, [*PROMPT, i], max_tokens=30, logprobs=2) for i in range(4)]
        for turn in range(400):
            h.step()
            pair.renew_lease()
            if turn % 7 == 0:
                inbox.drain(pair)
        for i, sequence in enumerate(sequences):
            assert inbox.tokens(sequence) == expected_tokens([*PROMPT, i], 30, VOCAB)
            assert [int(c["index"]) for c in inbox.of_kind(sequence, CqeKind.TOKEN)] == list(range(30))


def test_a_frontend_that_reads_nothing_is_stepped_only_while_its_queue_has_room() -> None:
    with running(small_config(), cq_entries=16) as h:
        pair = h.frontend()
        submit(h, pair, PROMPT, max_tokens=50)
        results = []
        for _ in range(60):
            pair.renew_lease()
            results.append(h.step())
        assert results[-1] == StepResult.IDLE
        assert int(h.sequences[0]["num_generated"]) == 15  # one entry told of the admission


@pytest.mark.parametrize("best_effort", [False, True])
def test_a_frontend_that_reads_nothing_does_not_take_places_and_blocks_from_others(best_effort: bool) -> None:
    with running(small_config(max_num_seqs=2), num_blocks=8, cq_entries=16) as h:
        deaf, pair, inbox = h.frontend(0), h.frontend(1), Inbox()
        for i in range(2):
            submit(h, deaf, [*PROMPT[:8], i] * 2, max_tokens=40)
        for _ in range(40):
            deaf.renew_lease()
            h.step()
        sequences = [submit(h, pair, [*PROMPT, i] * 2, max_tokens=40, best_effort=best_effort) for i in range(3)]
        for _ in range(400):
            deaf.renew_lease()
            inbox.drain(pair)
            h.step()
        for i, sequence in enumerate(sequences):
            assert inbox.tokens(sequence) == expected_tokens([*PROMPT, i] * 2, 40, VOCAB)
        # And the deaf one, when it hears again, has lost nothing.
        run_until_finished(h, inbox, [deaf, pair], list(inbox.completions))
        inbox.drain(deaf)


def hold_all_slots_unread(h: Harness, deaf: QueuePair) -> None:
    """Let a frontend fill as many slots as it can have: urgent requests park best-effort ones; then it stops."""
    inbox = Inbox()
    for best_effort in (True, False):
        for i in range(int(h.geometry["max_num_seqs"])):
            submit(h, deaf, [*PROMPT, i], max_tokens=50, best_effort=best_effort)
        for _ in range(4):
            h.step()
            inbox.drain(deaf)
    for _ in range(60):
        deaf.renew_lease()
        h.step()


def steps_of_a_request(h: Harness, pair: QueuePair, deaf: QueuePair | None) -> int:
    """Return the passes that a request takes from its submission to its end, while the deaf one keeps its lease."""
    inbox = Inbox()
    sequence = submit(h, pair, PROMPT, max_tokens=10)
    for steps in range(200):
        if inbox.finish(sequence) is not None:
            assert inbox.tokens(sequence) == expected_tokens(PROMPT, 10, VOCAB)
            return steps
        if deaf is not None:
            deaf.renew_lease()
        h.step()
        inbox.drain(pair)
    raise AssertionError("the request starves")


@pytest.mark.parametrize("late", [False, True], ids=["attached before", "attached later"])
def test_a_frontend_that_holds_slots_and_reads_nothing_does_not_slow_others(late: bool) -> None:
    with running(small_config(), cq_entries=64) as h:
        pair = h.frontend(1)
        alone = steps_of_a_request(h, pair, None)
    with running(small_config(num_queue_pairs=3), cq_entries=64) as h:
        pair = h.frontend(1)
        if late:  # nobody is there that slots were kept for
            pair._link.store_word(pair._at.attach, 0)
            h.step()
        deaf = h.frontend(0)
        hold_all_slots_unread(h, deaf)
        assert int(h.queue_pairs[0]["num_slots"]) == (8 if late else 6)
        if late:
            for _ in range(31):  # --stall-timeout
                deaf.renew_lease()
                h.step(1000)
            pair = h.frontend(1)
        for _ in range(8):
            assert steps_of_a_request(h, pair, deaf) <= 2 * alone


def test_a_full_queue_that_is_left_unread_costs_the_queue_pair_though_its_lease_is_renewed() -> None:
    with running(small_config(stall_timeout=7.0), cq_entries=16) as h:
        deaf = h.frontend(0)
        submit(h, deaf, PROMPT, max_tokens=50)
        for _ in range(40):
            deaf.renew_lease()
            h.step()
        for _ in range(6):
            deaf.renew_lease()
            h.step(1000)
        assert deaf.is_attached() and live_of(h, 0) == 1
        deaf.drain()
        for _ in range(7):  # it was read: time starts anew
            deaf.renew_lease()
            h.step(1000)
        assert deaf.is_attached()
        for _ in range(20):
            deaf.renew_lease()
            h.step()
        for _ in range(9):
            deaf.renew_lease()
            h.step(1000)
        assert not deaf.is_attached() and live_of(h, 0) == 0
        assert h.statistic("expired_leases") == 1
        successor, inbox = h.frontend(0), Inbox()
        sequence = submit(h, successor, PROMPT, max_tokens=3)
        run_until_finished(h, inbox, [successor], [sequence])


@pytest.mark.parametrize("heads", [(0x80000000,), (0x80000000, 0x70000000)])
def test_senseless_heads_do_not_count_as_reading(heads: tuple[int, ...]) -> None:
    with running(small_config(stall_timeout=7.0), cq_entries=16) as h:
        deaf = h.frontend(0)
        submit(h, deaf, PROMPT, max_tokens=50)
        for turn in range(12):
            deaf.renew_lease()
            store(h, deaf, 0, "cq_head", heads[turn % len(heads)])
            h.step(1000)
        assert not deaf.is_attached()


def test_a_queue_pair_takes_all_slots_that_nobody_else_keeps_or_asks_for() -> None:
    with running(small_config(max_num_seqs=8), num_blocks=64) as h:
        alone, inbox = h.frontend(0), Inbox()
        for best_effort in (True, False):
            for i in range(4):
                submit(h, alone, [*PROMPT, i], max_tokens=40, best_effort=best_effort)
        for _ in range(4):
            inbox.drain(alone)
            h.step()
        h.frontend(1)
        assert int((h.sequences["status"] == 2).sum()) == 8, "idle frontends keep no place of the batch free"


def test_an_expired_lease_frees_everything_of_that_frontend_and_nothing_of_others() -> None:
    with running(small_config(), num_blocks=16) as h:
        dying, pair, inbox = h.frontend(0), h.frontend(1), Inbox()
        for i in range(6):
            submit(h, dying, [*PROMPT, i], max_tokens=50, cached=False)
        other = submit(h, pair, PROMPT, max_tokens=50)
        for _ in range(LEASE_MS // 500 - 1):
            inbox.drain(pair)
            h.step(500)
        assert live_of(h, 0) == 6
        for _ in range(4):
            inbox.drain(pair)
            h.step(500)
        assert live_of(h, 0) == 0 and not dying.is_attached()
        run_until_finished(h, inbox, [pair], [other])
        assert inbox.tokens(other) == expected_tokens(PROMPT, 50, VOCAB)
        h.step()
        h.step()
        assert h.statistic("expired_leases") == 1
        assert h.statistic("num_blocks_used") == 0


@pytest.mark.parametrize("lanes", [0, 3])
def test_expired_leases_are_counted_though_no_step_runs(lanes: int, lane_steps: Callable[[int], Step]) -> None:
    """Several may expire in one pass, which several lanes find at once."""
    step = lane_steps(lanes) if lanes else lib.blink_step
    with running(small_config(num_queue_pairs=5), step=step) as h:
        kept, silent = h.frontend(0), [h.frontend(index) for index in range(1, 5)]
        for _ in range(LEASE_MS // 500 - 1):
            kept.renew_lease()
            h.step(500)
        assert all(pair.is_attached() for pair in silent) and h.statistic("expired_leases") == 0
        kept.renew_lease()
        assert h.step(600) == StepResult.IDLE
        assert not any(pair.is_attached() for pair in silent) and h.statistic("expired_leases") == 4


def test_a_pause_of_the_whole_machine_costs_no_lease() -> None:
    """The scheduler may be the first to run again: what a frontend could not renew meanwhile does not count."""
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = submit(h, pair, PROMPT, max_tokens=20)
        for _ in range(3):
            inbox.drain(pair)
            h.step()
            h.step(600 * 1000)
            assert pair.is_attached()
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == expected_tokens(PROMPT, 20, VOCAB) and h.statistic("expired_leases") == 0
        for _ in range(4):  # and yet a frontend that is silent for good loses it
            h.step(600 * 1000)
        assert not pair.is_attached()


def test_a_renewed_lease_never_expires() -> None:
    with running(small_config()) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = submit(h, pair, PROMPT, max_tokens=20)
        for _ in range(25):
            inbox.drain(pair)
            h.step(LEASE_MS - 1)
        assert pair.is_attached() and inbox.finish(sequence) == FinishReason.LENGTH


def test_a_successor_starts_clean_and_gets_nothing_of_its_predecessor() -> None:
    with running(small_config()) as h:
        first, inbox = h.frontend(0), Inbox()
        for i in range(5):
            submit(h, first, [*PROMPT, i], max_tokens=50)
        for _ in range(3):
            h.step()
        for i in range(3):
            submit(h, first, [*PROMPT, i], max_tokens=50)  # entries that nobody has read yet
        second = h.frontend(0)
        assert live_of(h, 0) == 0 and not first.is_attached()
        sequence = submit(h, second, PROMPT, max_tokens=12)
        run_until_finished(h, inbox, [second], [sequence])
        assert list(inbox.completions) == [sequence]
        assert inbox.tokens(sequence) == expected_tokens(PROMPT, 12, VOCAB)
        assert live_of(h, 0) == 0


def test_a_successor_waits_until_the_step_in_flight_is_over() -> None:
    with running(small_config()) as h:
        first = h.frontend(0)
        submit(h, first, PROMPT, max_tokens=50)
        for _ in range(3):
            h.step()
        h.step(finish=False)
        second = h.attach_later(0)
        for _ in range(3):
            assert h.step(finish=False) == StepResult.BUSY
            assert not second.is_attached() and not first.is_attached()
        h.finish()
        h.step()
        h.step()
        assert second.is_attached()


@pytest.mark.parametrize("tail", [17, 1 << 31, -1 & 0xFFFFFFFF])
def test_a_senseless_queue_tail_closes_that_queue_pair_alone(tail: int) -> None:
    with running(small_config()) as h:
        faulty, pair, inbox = h.frontend(0), h.frontend(1), Inbox()
        submit(h, faulty, PROMPT, max_tokens=50)
        other = submit(h, pair, PROMPT, max_tokens=20)
        for _ in range(3):
            h.step()
        store(h, faulty, 0, "sq_tail", 1 + tail & 0xFFFFFFFF)
        for _ in range(3):
            h.step()
        assert not faulty.is_attached() and live_of(h, 0) == 0
        run_until_finished(h, inbox, [pair], [other])
        assert inbox.tokens(other) == expected_tokens(PROMPT, 20, VOCAB)
        successor = h.frontend(0)
        sequence = submit(h, successor, PROMPT, max_tokens=2)
        run_until_finished(h, inbox, [successor], [sequence])


def test_a_senseless_completion_head_stops_deliveries_to_that_queue_pair_alone() -> None:
    with running(small_config()) as h:
        faulty, pair, inbox = h.frontend(0), h.frontend(1), Inbox()
        submit(h, faulty, PROMPT, max_tokens=50)
        other = submit(h, pair, PROMPT, max_tokens=20)
        store(h, faulty, 0, "cq_head", 0x80000000)
        for _ in range(5):
            h.step()
        assert int(h.sequences[0]["num_generated"]) == 0
        run_until_finished(h, inbox, [pair], [other])
        assert inbox.tokens(other) == expected_tokens(PROMPT, 20, VOCAB)


BAD_ENTRIES = {
    RejectCode.OPCODE: {"opcode": 9},
    RejectCode.TAG: {"sequence": 8},
    RejectCode.TAG_BUSY: {"sequence": 7 << 32},
    RejectCode.UNKNOWN_SEQUENCE: {"opcode": Opcode.CANCEL, "sequence": 77 << 32},
    RejectCode.PROMPT_LENGTH: {"num_prompt_tokens": 64},
    RejectCode.PROMPT_RANGE: {"prompt_offset": 2},
    RejectCode.PROMPT_TOKEN: {"num_stop_tokens": 1, "stop_tokens": [VOCAB] + [0] * 7},
    RejectCode.STOP_TOKENS: {"num_stop_tokens": 129},
    RejectCode.LOGIT_BIAS: {"num_biases": 1025},
    RejectCode.HASHES: {"num_hashes": 2},
    RejectCode.SAMPLING_VALUE: {"temperature": float("nan")},
    RejectCode.MAX_TOKENS: {"max_tokens": 0},
    RejectCode.SERVICE_CLASS: {"service_class": 2},
    RejectCode.PREDICTION: {"num_prediction_tokens": 65},
    RejectCode.TPOT_TARGET: {"tpot_target_us": CONSTANTS["max_tpot_target_us"] + 1},
    RejectCode.BIAS_VALUE: {"num_biases": 1, "bias_offset": 4096},  # where the test writes a NaN
    RejectCode.ADAPTER: {"adapter": 1, "adapter_generation": 1},
    RejectCode.AUTOMATON_RANGE: {"automaton_bytes": 1 << 20},
    RejectCode.AUTOMATON: {"automaton_bytes": 512, "automaton_offset": 8192},  # where there is none
}


def test_every_reason_to_refuse_an_entry_is_provoked() -> None:
    """DRAINING by the drain word, below; POOLING in test_pooling_steps.py; the others by a bad entry."""
    assert {*BAD_ENTRIES, RejectCode.NONE, RejectCode.DRAINING, RejectCode.POOLING} == set(RejectCode)


@pytest.mark.parametrize("code", BAD_ENTRIES)
def test_a_bad_entry_is_refused_with_its_reason_and_touches_nothing_else(code: RejectCode) -> None:
    with running(small_config(), vocab_bytes=8) as h:
        pair, inbox = h.frontend(), Inbox()
        sound = submit(h, pair, PROMPT, max_tokens=9)  # tag 0, generation 1
        h.step()
        entry = np.zeros((), SQE)
        sane = {
            "opcode": Opcode.SUBMIT,
            "sequence": 5 << 32 | 3,
            "num_prompt_tokens": 9,
            "top_p": 1,
            "repetition_penalty": 1,
        }
        for name, value in {**sane, "num_logprobs": -1, "max_tokens": 1, **BAD_ENTRIES[code]}.items():
            (entry["sampling"] if name in (SAMPLING.names or ()) else entry)[name] = value
        write_arena(pair, 4096, np.array([1, np.float32("nan").view(np.int32)], np.int32))
        pair._push(entry.tobytes())
        for _ in range(4):
            h.step()
        refusals = [c for c in raw_completions(pair) if c["kind"] == CqeKind.REJECTED]
        assert [(int(c["sequence"]), RejectCode(int(c["token"]))) for c in refusals] == [(int(entry["sequence"]), code)]
        assert h.statistic("num_rejected") == 1
        run_until_finished(h, inbox, [pair], [sound])
        assert inbox.tokens(sound) == expected_tokens(PROMPT, 9, VOCAB)


@pytest.mark.parametrize("name", SAMPLING_RANGES)
def test_the_scheduler_takes_the_range_of_each_sampling_parameter_and_nothing_else(name: str) -> None:
    allowed, kind = SAMPLING_RANGES[name], SAMPLING[name].type
    entry = np.zeros((), SQE)
    sane = {each: limits.default for each, limits in SAMPLING_RANGES.items()}
    entry["opcode"], entry["num_prompt_tokens"], entry["max_tokens"] = Opcode.SUBMIT, 9, 1
    entry["sampling"]["num_logprobs"] = -1

    def is_refused(value: float) -> bool:
        for each, usual in {**sane, name: value}.items():
            entry["sampling"][each] = usual
        with running(small_config()) as h:
            pair = h.frontend()
            pair._push(entry.tobytes())
            h.step()
            refusals = [c["token"] for c in raw_completions(pair) if c["kind"] == CqeKind.REJECTED]
        assert refusals in ([], [RejectCode.SAMPLING_VALUE])
        return bool(refusals)

    is_float = SAMPLING[name].kind == "f"
    step = np.finfo(np.float32).smallest_subnormal if is_float else 1
    lowest = allowed.low if allowed.holds_low else allowed.low + step
    assert not is_refused(lowest) and not is_refused(allowed.high)
    below = np.nextafter(kind(lowest), kind(-np.inf)) if is_float else lowest - 1
    assert is_refused(below)
    if is_float:  # a top_k above the range is one below it
        assert all(is_refused(value) for value in (np.nextafter(kind(allowed.high), kind(np.inf)), np.nan, np.inf))


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), -float("inf"), 100.5, -1e38])
def test_a_bias_that_is_no_number_or_too_large_ends_its_request_alone(bias: float) -> None:
    with running(small_config()) as h:
        hostile, pair, refused, inbox = h.frontend(0), h.frontend(1), Inbox(), Inbox()
        sound = submit(h, pair, PROMPT, max_tokens=9, logit_bias={5: 100.0, 6: -100.0})
        bad = submit(h, hostile, PROMPT, logit_bias=dict.fromkeys(range(5), 1.0))
        live = hostile._live[bad & 0xFFFFFFFF]
        write_arena(hostile, live.offset + live.num_bytes - 4, np.array([bias], np.float32))  # the last of the five
        run_until_finished(h, refused, [hostile], [bad])
        run_until_finished(h, inbox, [pair], [sound])
        assert [RejectCode(int(c["token"])) for c in refused.of_kind(bad, CqeKind.REJECTED)] == [RejectCode.BIAS_VALUE]
        assert inbox.tokens(sound) == expected_tokens(PROMPT, 9, VOCAB)
        assert live_of(h, 0) == 0


def write_arena(pair: QueuePair, offset: int, words: np.ndarray[Any, Any]) -> None:
    pair._link.write(pair._at.arena + offset, words.tobytes())


def raw_completions(pair: QueuePair) -> list[Completion]:
    """Look at what has arrived, also for sequences that the queue pair does not know, without taking it."""
    out = np.zeros(64, CQE)
    count = pair._link.drain(pair.head, out.ctypes.data, len(out))
    return list(out[:count].view(COMPLETION))


def test_draining_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    with running(small_config(max_num_seqs=1)) as h:
        pair, inbox = h.frontend(), Inbox()
        accepted = [submit(h, pair, [*PROMPT, i], max_tokens=6) for i in range(3)]
        h.step()
        h.region.store_control("drain", 1)
        h.step()
        assert h.engine_state == EngineState.DRAINING
        late = submit(h, pair, PROMPT, max_tokens=6)
        run_until_finished(h, inbox, [pair], [*accepted, late])
        assert [inbox.finish(sequence) for sequence in accepted] == [FinishReason.LENGTH] * 3
        assert [RejectCode(int(c["token"])) for c in inbox.of_kind(late, CqeKind.REJECTED)] == [RejectCode.DRAINING]
        h.step()
        h.step()
        assert h.engine_state == EngineState.DRAINED


def test_queue_pairs_keep_their_order_across_the_wrap_of_their_rings() -> None:
    with running(small_config(), cq_entries=16, sq_entries=4) as h:
        pair, inbox = h.frontend(), Inbox()
        for turn in range(40):
            sequence = submit(h, pair, [*PROMPT, turn], max_tokens=4)
            run_until_finished(h, inbox, [pair], [sequence])
            assert inbox.tokens(sequence) == expected_tokens([*PROMPT, turn], 4, VOCAB)
        assert pair.head == 40 * 5


def test_a_full_submission_queue_refuses_without_a_trace() -> None:
    with running(small_config(max_sequences_per_worker=8), sq_entries=4) as h:
        pair, inbox = h.frontend(), Inbox()
        sequences = [submit(h, pair, PROMPT, max_tokens=2) for _ in range(4)]
        with pytest.raises(OverloadedError, match="keep up"):
            pair.submit(submission(PROMPT), SamplingParams())
        assert pair.num_live == 4
        run_until_finished(h, inbox, [pair], sequences)
        assert pair.num_live == 0


def test_an_idle_scheduler_has_news_of_all_that_a_frontend_does_but_live() -> None:
    """A GPU's idle scheduler runs a pass only for news, or when one is due."""
    with running(small_config(), num_queue_pairs=2) as h:

        def has_news() -> list[int]:
            return [lib.blink_has_news(h.state.address, index) for index in range(2)]

        pair, inbox = h.frontend(1), Inbox()
        h.step()
        assert has_news() == [0, 0]
        pair.renew_lease()
        assert has_news() == [0, 0]
        sequence = submit(h, pair, PROMPT, max_tokens=2)
        assert has_news() == [0, 1]
        run_until_finished(h, inbox, [pair], [sequence])
        assert has_news() == [0, 1], "what was read makes room"
        h.step()
        pair.cancel(sequence)
        assert has_news() == [0, 0], "there is nothing to cancel"
        pair.request_attach()
        assert has_news() == [0, 1]
        h.step()
        assert has_news() == [0, 0]


@pytest.mark.parametrize(
    ("named", "logprobs", "biases", "refusal"),
    [(2, 2, 2, None), (2, 3, 3, RejectCode.SAMPLING_VALUE), (2, 2, 1, RejectCode.LOGIT_BIAS)],
)
def test_named_logprobs_are_all_of_them_and_have_their_biases(
    named: int, logprobs: int, biases: int, refusal: RejectCode | None
) -> None:
    entry = np.zeros((), SQE)
    entry["opcode"], entry["num_prompt_tokens"], entry["max_tokens"] = Opcode.SUBMIT, 9, 1
    sampling = {"top_p": 1, "repetition_penalty": 1, "num_logprobs": logprobs, "named_logprobs": named}
    for name, value in sampling.items():
        entry["sampling"][name] = value
    entry["num_biases"] = biases
    with running(small_config()) as h:
        pair = h.frontend()
        pair._push(entry.tobytes())
        h.step()
        refusals = [c["token"] for c in raw_completions(pair) if c["kind"] == CqeKind.REJECTED]
    assert refusals == ([] if refusal is None else [refusal])
