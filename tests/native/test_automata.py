# SPDX-License-Identifier: Apache-2.0
"""Automata in the scheduler: one copy for all that name it, kept while it is used, of one owner alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from automata import sound_automata
from blink.errors import OverloadedError
from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.link.queue_pair import QueuePair, Submission
from blink.region.layout import AUTOMATON_PLACE, CONSTANTS, SLOT_PARAMS, CqeKind, FinishReason, RejectCode, StepResult
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from harness import Harness, Inbox, expected_tokens, run_until_finished, running, small_config, submit

PROMPT = [3, 1, 4, 1, 5]
VOCAB = 97
SOUND = [Automaton(data) for data in sound_automata()]


def constrained(pair: QueuePair, automaton: Automaton | None, count: int = 4, flow: int = 0) -> int:
    submission = Submission(np.asarray(PROMPT, np.int32), (), 0, b"", flow, automaton=automaton)
    return pair.submit(submission, SamplingParams(max_tokens=count))


def open_engine(**options: Any) -> Any:
    return running(small_config(), vocab_bytes=8, **options)


def held(h: Harness) -> list[bytes]:
    """The automata that slots of running sequences name, as the engine holds them."""
    automata = h.state.array("automata", "u1").reshape(-1, CONSTANTS["max_automaton_bytes"])
    params = h.state.array("params", SLOT_PARAMS)
    slots = h.step_array("row_slots", "i4")[: int(h.batch[0]["num_rows"])]
    return [automata[int(params[slot]["automaton"]) - 1].tobytes() for slot in slots.tolist()]


def test_sequences_of_one_automaton_share_a_copy() -> None:
    with open_engine() as h:
        pair, inbox = h.frontend(), Inbox()
        sequences = [constrained(pair, SOUND[0]) for _ in range(3)]
        h.step()
        assert all(data.startswith(SOUND[0].data) for data in held(h)) and len(held(h)) == 3
        assert int(h.scheduler["num_automata_used"]) == 1
        run_until_finished(h, inbox, [pair], sequences)
        later = constrained(pair, SOUND[0])
        run_until_finished(h, inbox, [pair], [later])
        assert h.statistic("automata_loaded") == 1 and h.statistic("num_automata_used") == 0


def test_another_queue_pair_s_automaton_of_that_name_is_never_taken() -> None:
    with open_engine() as h:
        hostile, pair, inbox = h.frontend(0), h.frontend(1), Inbox()
        forged = Automaton(SOUND[1].data)
        forged.__dict__["name"] = SOUND[0].name
        run_until_finished(h, inbox, [hostile], [constrained(hostile, forged)])
        constrained(pair, SOUND[0])
        h.step()
        assert held(h)[0].startswith(SOUND[0].data)


def test_a_successor_takes_nothing_of_its_predecessor() -> None:
    with open_engine() as h:
        first, inbox = h.frontend(), Inbox()
        forged = Automaton(SOUND[1].data)
        forged.__dict__["name"] = SOUND[0].name
        run_until_finished(h, inbox, [first], [constrained(first, forged)])
        second = h.frontend()
        constrained(second, SOUND[0])
        h.step()
        assert held(h)[0].startswith(SOUND[0].data)


def test_automata_beyond_their_number_wait_and_others_pass() -> None:
    with open_engine(num_automata=4) as h:
        pair, inbox = h.frontend(), Inbox()
        two = [constrained(pair, SOUND[index], 12) for index in range(2)]
        h.step()
        assert h.scheduler["num_automata_used"] == 2
        third, same, plain = constrained(pair, SOUND[2]), constrained(pair, SOUND[0]), submit(h, pair, PROMPT)
        for _ in range(4):
            h.step()
        inbox.drain(pair)
        assert inbox.cached(third) is None
        assert inbox.cached(same) is not None and inbox.cached(plain) is not None
        run_until_finished(h, inbox, [pair], [*two, third, same, plain])
        assert inbox.tokens(third) == expected_tokens(PROMPT, 4, VOCAB)
        assert h.statistic("automata_loaded") == 3


def test_one_step_waits_for_so_many_bytes_of_automata_alone() -> None:
    texts = ["ab" * 5600 + str(index) for index in range(5)]
    large = [Automaton(compile_structured(StructuredOutputsParams(choice=[text])).data) for text in texts]
    assert all(len(automaton.data) in range(48_000, 64_000) for automaton in large)
    with running(small_config(max_num_seqs=8), vocab_bytes=8, arena_bytes=1 << 20) as h:
        pair, inbox = h.frontend(), Inbox()
        sequences = [constrained(pair, automaton, 12) for automaton in large]
        others = [constrained(pair, large[0], 12), submit(h, pair, PROMPT, max_tokens=12)]
        admitted = []
        for _ in range(3):
            h.step()
            inbox.drain(pair)
            admitted.append([inbox.cached(each) is not None for each in sequences])
            assert all(inbox.cached(each) is not None for each in others)
        assert admitted == [[True] * 2 + [False] * 3, [True] * 4 + [False], [True] * 5]
        run_until_finished(h, inbox, [pair], [*sequences, *others])
        assert all(inbox.tokens(each) == expected_tokens(PROMPT, 12, VOCAB) for each in sequences)


def test_the_longest_unused_automaton_makes_way() -> None:
    with open_engine(num_automata=2) as h:
        pair, inbox = h.frontend(), Inbox()
        for index in (0, 1, 0, 2, 0, 1):
            run_until_finished(h, inbox, [pair], [constrained(pair, SOUND[index])])
        assert h.statistic("automata_loaded") == 4  # 0, 1, 2 in the place of 1, 1 in the place of 2


def test_places_are_forgotten_with_their_sequence() -> None:
    with open_engine() as h:
        pair, inbox = h.frontend(), Inbox()
        run_until_finished(h, inbox, [pair], [constrained(pair, SOUND[0])])
        h.state.array("automaton_places", "u4")[:] = 1
        constrained(pair, SOUND[0])
        h.step()
        slot = int(h.step_array("row_slots", "i4")[0])
        places = h.state.array("automaton_places", "u4").reshape(-1, 2, AUTOMATON_PLACE.itemsize // 4)
        assert places[slot, :, 0].tolist() == [0xFFFFFFFF] * 2


def test_a_complete_text_ends_without_a_token() -> None:
    with open_engine() as h:
        pair, inbox = h.frontend(), Inbox()
        ended, other = constrained(pair, SOUND[2], 9), submit(h, pair, PROMPT, max_tokens=9)
        for _ in range(3):
            h.step()
        assert h.step(finish=False) == StepResult.LAUNCHED
        row = [index for index, _ in h.batch_rows()].index(ended & 0xFFFFFFFF)
        h.step_array("sampled_tokens", "i4")[row] = CONSTANTS["grammar_done"]
        h.finish()
        run_until_finished(h, inbox, [pair], [ended, other])
        assert inbox.finish(ended) == FinishReason.STOP and len(inbox.tokens(ended)) == 3
        assert inbox.tokens(other) == expected_tokens(PROMPT, 9, VOCAB)


@pytest.mark.parametrize("word", [0, 1, 2, 3, 20, 70, 200])
def test_a_damaged_automaton_ends_its_request_alone(word: int) -> None:
    with open_engine() as h:
        pair, inbox = h.frontend(), Inbox()
        sound = constrained(pair, SOUND[1], 9)
        words = np.frombuffer(bytearray(SOUND[0].data), np.uint32)
        words[word] = 0x7FFE7FFE
        bad = constrained(pair, Automaton(words.tobytes()))
        run_until_finished(h, inbox, [pair], [sound, bad])
        refused = inbox.of_kind(bad, CqeKind.REJECTED)
        assert [RejectCode(int(each["token"])) for each in refused] == [RejectCode.AUTOMATON]
        assert inbox.tokens(sound) == expected_tokens(PROMPT, 9, VOCAB)


def test_the_arena_keeps_automata_until_it_needs_their_memory() -> None:
    with open_engine(arena_bytes=1 << 16) as h:
        pair, inbox = h.frontend(), Inbox()
        large = [
            Automaton(compile_structured(StructuredOutputsParams(choice=["ab" * 1400 + str(index)])).data)
            for index in range(5)
        ]
        assert all(20_000 < len(automaton.data) < 1 << 15 for automaton in large)
        first = [constrained(pair, automaton) for automaton in large[:2]]
        with pytest.raises(OverloadedError, match="prompt memory"):
            for automaton in large[2:]:
                constrained(pair, automaton)
        assert pair.arena_used_bytes > 40_000
        run_until_finished(h, inbox, [pair], [*first, *(s for s in inbox.completions if s not in first)])
        for _ in range(20):
            h.step()
            inbox.drain(pair)
        assert pair.arena_used_bytes == 0  # what is left of them can be taken at any time
        for automaton in large:
            run_until_finished(h, inbox, [pair], [constrained(pair, automaton)])
