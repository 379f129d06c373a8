# SPDX-License-Identifier: Apache-2.0
"""What becomes of a paused step's rows that are constrained, scored beside, or kept in the prefix cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from automata import sound_automata
from blink.grammar.automaton import Automaton
from blink.link.queue_pair import QueuePair, Submission
from blink.region.layout import CONSTANTS, FinishReason, Opcode, StepClass
from blink.sampling_params import SamplingParams
from harness import Inbox, expected_tokens, run_until_finished, submission, submit
from test_prompt_logprob_steps import check_prompt_logprobs
from test_scheduler_classes import SEGMENTS, VOCAB, assert_answers, costed, launch, prompt_of, rows_of, start_long_step

SOUND = [Automaton(data) for data in sound_automata()]


def constrained(pair: QueuePair, index: int, prompt: list[int], **params: Any) -> int:
    entry = Submission(np.asarray(prompt, np.int32), (), 0, b"", automaton=SOUND[index])
    return pair.submit(entry, SamplingParams(**params))


def test_a_text_that_is_complete_ends_with_its_paused_step() -> None:
    with costed(vocab_bytes=8) as h:
        pair, inbox = h.frontend(), Inbox()
        slow = [constrained(pair, 0, prompt_of(12, i), max_tokens=9, best_effort=True) for i in range(2)]
        for segment in range(2):
            assert launch(h, pair, inbox)["segment"] == segment
        urgent = constrained(pair, 1, prompt_of(9, 40), max_tokens=3)
        assert launch(h, pair, inbox)["step_class"] == StepClass.URGENT
        assert int(h.scheduler["num_automata_used"]) == 2
        for segment in range(2, SEGMENTS):
            assert launch(h, pair, inbox)["segment"] == segment
        row = [index for index, _ in h.batch_rows()].index(slow[0] & 0xFF)
        h.step_array("sampled_tokens", "i4")[row] = CONSTANTS["grammar_done"]
        launch(h, pair, inbox)
        inbox.drain(pair)
        assert inbox.finish(slow[0]) == FinishReason.STOP and inbox.tokens(slow[0]) == []
        assert_answers(h, pair, inbox, {slow[1]: (prompt_of(12, 1), 9), urgent: (prompt_of(9, 40), 3)})
        assert int(h.scheduler["num_automata_used"]) == 0


def test_a_cancelled_paused_row_keeps_its_automaton_to_the_end() -> None:
    with costed(vocab_bytes=8, num_automata=1) as h:
        pair, inbox = h.frontend(), Inbox()
        slow = constrained(pair, 0, prompt_of(12), max_tokens=9, best_effort=True)
        launch(h, pair, inbox)
        pair.cancel(slow)
        urgent = constrained(pair, 1, prompt_of(9, 40), max_tokens=3)
        for segment in range(1, SEGMENTS):
            assert launch(h, pair, inbox)["segment"] == segment
            assert h.statistic("automata_loaded") == 1
        assert_answers(h, pair, inbox, {urgent: (prompt_of(9, 40), 3)})
        assert inbox.finish(slow) == FinishReason.ABORT and h.statistic("automata_loaded") == 2


def test_an_urgent_request_without_room_for_its_automaton_keeps_nobody_from_running() -> None:
    with costed(vocab_bytes=8, num_automata=1, best_effort_share=1) as h:
        pair, inbox = h.frontend(), Inbox()
        slow = constrained(pair, 0, prompt_of(3), max_tokens=8, best_effort=True)
        urgent = submit(h, pair, prompt_of(5, 20), max_tokens=30)
        while len(inbox.tokens(slow)) < 2:
            launch(h, pair, inbox)
        waiting = constrained(pair, 1, prompt_of(3, 50), max_tokens=2)
        launch(h, pair, inbox)
        while inbox.finish(slow) is None:
            assert launch(h, pair, inbox)["step_class"] == StepClass.ALL
            assert inbox.cached(waiting) is None or inbox.finish(slow)
        answers = {slow: (prompt_of(3), 8), urgent: (prompt_of(5, 20), 30), waiting: (prompt_of(3, 50), 2)}
        assert_answers(h, pair, inbox, answers)


def test_prompt_logprobs_come_of_a_whole_step_between_two_segments() -> None:
    with costed() as h:
        scoring = int(h.geometry["first_scoring_graph"])
        pair, inbox, slow = start_long_step(h)
        prompt = prompt_of(40, 7)  # in two steps
        urgent = submit(h, pair, prompt, max_tokens=3, prompt_logprobs=2)
        for _ in range(2):
            entry = launch(h, pair, inbox)
            assert entry["graph"] >= scoring
            assert (entry["num_segments"], entry["step_class"]) == (0, StepClass.URGENT)
        for segment in range(2, SEGMENTS):
            assert launch(h, pair, inbox)["segment"] == segment
        answers = {sequence: (prompt_of(12, i), 12) for i, sequence in enumerate(slow)}
        assert_answers(h, pair, inbox, answers | {urgent: (prompt, 3)})
        check_prompt_logprobs(inbox, urgent, prompt, 2)


def test_best_effort_prompt_logprobs_come_of_steps_that_are_not_cut() -> None:
    with costed() as h:
        pair, inbox, prompt = h.frontend(), Inbox(), prompt_of(40)
        sequence = submit(h, pair, prompt, max_tokens=3, prompt_logprobs=1, best_effort=True)
        found = [launch(h, pair, inbox) for _ in range(3)]
        assert [int(entry["num_segments"]) for entry in found] == [0, 0, SEGMENTS]
        assert [int(entry["num_best_effort_rows"]) for entry in found] == [1, 1, 1]
        assert_answers(h, pair, inbox, {sequence: (prompt, 3)})
        check_prompt_logprobs(inbox, sequence, prompt, 1)


def test_an_answer_of_steps_in_segments_is_found_by_the_next_turn() -> None:
    with costed(num_blocks=64) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), prompt_of(12)
        entry = submission(prompt, (), h.hashes(prompt), 0, h.hash_root())
        slow, urgent = pair.submit(entry, SamplingParams(max_tokens=20, best_effort=True)), list[int]()
        while inbox.finish(slow) is None:
            h.step()
            inbox.drain(pair)
            if h.is_segment and h.batch[0]["segment"] == 1:
                urgent.append(submit(h, pair, prompt_of(9, 40 + len(urgent)), max_tokens=1))
        answer = expected_tokens(prompt, 20, VOCAB)
        assert inbox.tokens(slow) == answer and len(urgent) > 10
        again = submit(h, pair, [*prompt, *answer, 5], max_tokens=1)
        run_until_finished(h, inbox, [pair], [*urgent, again])
        assert inbox.cached(again) == 24, "all blocks but the one that holds the last token"


def test_the_cache_is_emptied_beside_a_paused_step() -> None:
    with costed() as h:
        pair, inbox, slow = start_long_step(h)
        early = submit(h, pair, prompt_of(16, 40), max_tokens=1)
        launch(h, pair, inbox)
        pair.order(Opcode.RESET_PREFIX_CACHE)
        for segment in range(2, SEGMENTS):
            assert launch(h, pair, inbox)["segment"] == segment
        assert rows_of(h) == {0, 1} and h.statistic("prefix_resets") == 1
        late = submit(h, pair, prompt_of(16, 40), max_tokens=1)
        answers = {sequence: (prompt_of(12, i), 12) for i, sequence in enumerate(slow)}
        assert_answers(h, pair, inbox, answers | {early: (prompt_of(16, 40), 1), late: (prompt_of(16, 40), 1)})
        assert inbox.cached(late) == 0
