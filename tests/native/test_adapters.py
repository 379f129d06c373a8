# SPDX-License-Identifier: Apache-2.0
"""Adapters in the scheduler: who may use them, which the model holds a copy of, and whose blocks a prompt may meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from blink.adapters.protocol import Held
from blink.engine.geometry import build_geometry
from blink.link.queue_pair import KvOrigin, QueuePair
from blink.region.adapter_words import ADAPTER_WORDS
from blink.region.layout import DECISION_LOG_ENTRY, SLOT_PARAMS, CqeKind, RejectCode, StepResult, struct_dtype
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from harness import (
    Harness,
    Inbox,
    Step,
    expected_tokens,
    run_until_finished,
    running,
    small_config,
    submission,
)

VOCAB = 97
PROMPT = [*range(5, 30)]  # three blocks of 8, and a token
NO_ADAPTER = Held(-1, 0, "")
SIZES = {"num_adapters": 4, "num_adapter_slots": 2}


class Host:
    """Plays the engine's host process."""

    def __init__(self, harness: Harness) -> None:
        count = int(harness.geometry["num_adapters"])
        self.words = harness.region.view(ADAPTER_WORDS, int(harness.region.header["adapters_offset"]), count)
        self._harness = harness
        self._last = 0

    def load(self, index: int, content: int) -> Held:
        """Put an adapter into memory, and wait until sequences may use it."""
        self._last += 1
        self.words[index]["content"] = content
        self.words[index]["generation"] = self._last
        assert self.waits_for(index, self._last)
        return Held(index, self._last, "")

    def take_back(self, index: int) -> None:
        """Let no further sequence use an adapter."""
        self.words[index]["generation"] = 0

    def waits_for(self, index: int, generation: int) -> bool:
        """Whether the scheduler follows within some passes."""
        for _ in range(5):
            self._harness.step()
        return int(self.words[index]["seen"]) == generation


def submit(
    h: Harness, pair: QueuePair, adapter: Held, prompt: Sequence[int] = PROMPT, count: int = 9, salt: bytes = b""
) -> int:
    """Submit a prompt under an adapter, by default with the hashes that it has without any."""
    entry = submission(prompt, hashes=h.hashes(prompt, salt))._replace(origin=KvOrigin(variant=adapter.variant))
    return pair.submit(entry, SamplingParams(max_tokens=count))


def adapters_in_step(h: Harness) -> set[int]:
    """Return which adapters the model has for the rows of the newest step, as the model reads them."""
    params, places = h.state.array("params", SLOT_PARAMS), h.state.array("adapter_places", "i4")
    slots = h.step_array("row_slots", "i4")[: len(h.rows)]
    held = {int(places[slot - 1]) - 1 for slot in params[slots]["adapter"] if slot}
    wanted = {int(h.sequences[index]["sqe"]["adapter"]) - 1 for index in h.rows["sequence"].tolist()} - {-1}
    assert held == wanted, "a row has another adapter's weights"
    return held


def refusals(inbox: Inbox, sequence: int) -> list[RejectCode]:
    """Return why a sequence was refused."""
    return [RejectCode(int(c["token"])) for c in inbox.of_kind(sequence, CqeKind.REJECTED)]


def test_only_the_generation_that_the_host_has_loaded_may_be_used() -> None:
    with running(small_config(), **SIZES) as h:
        pair, inbox, host = h.frontend(), Inbox(), Host(h)
        early = submit(h, pair, Held(0, 1, ""))
        h.step()
        known = host.load(0, content=1)
        old = submit(h, pair, known)
        run_until_finished(h, inbox, [pair], [old, early])
        host.take_back(0)
        assert host.waits_for(0, 0)
        newer = host.load(0, content=1)
        wrong = [submit(h, pair, each) for each in (known, Held(0, 0, ""), Held(0, 99, ""), Held(1, 1, ""))]
        right = submit(h, pair, newer)
        run_until_finished(h, inbox, [pair], [*wrong, right])
        assert [refusals(inbox, each) for each in (early, *wrong)] == [[RejectCode.ADAPTER]] * 5
        assert inbox.tokens(old) == inbox.tokens(right) == expected_tokens(PROMPT, 9, VOCAB)


def test_the_host_gets_an_adapter_back_when_its_last_user_has_ended_and_no_new_one_comes_meanwhile() -> None:
    with running(small_config(), **SIZES) as h:
        pair, inbox, host = h.frontend(), Inbox(), Host(h)
        adapter = host.load(2, content=1)
        running_one = submit(h, pair, adapter, count=30)
        assert host.waits_for(2, adapter.generation)
        host.take_back(2)
        late = submit(h, pair, adapter)
        assert not host.waits_for(2, 0)
        run_until_finished(h, inbox, [pair], [running_one, late])
        assert host.waits_for(2, 0)
        assert refusals(inbox, late) == [RejectCode.ADAPTER]
        assert inbox.tokens(running_one) == expected_tokens(PROMPT, 30, VOCAB)


def test_a_step_has_no_more_adapters_than_the_model_has_slots_and_all_get_their_turn() -> None:
    with running(small_config(), **SIZES) as h:
        pair, inbox, host = h.frontend(), Inbox(), Host(h)
        adapters = [host.load(index, content=index + 1) for index in range(4)]
        open_ones = [submit(h, pair, adapter) for adapter in [*adapters, NO_ADAPTER, NO_ADAPTER]]
        most, seen = 0, set[int]()
        while h.statistic("num_running") or h.statistic("num_waiting") or not seen:
            h.step()
            inbox.drain(pair)
            held = adapters_in_step(h)
            most, seen = max(most, len(held)), seen | held
        assert (most, seen) == (2, {0, 1, 2, 3})
        assert [inbox.tokens(each) for each in open_ones] == [expected_tokens(PROMPT, 9, VOCAB)] * 6
        assert host.words["num_users"].tolist() == host.words["num_in_slots"].tolist() == [0] * 4


def test_the_slot_that_was_not_used_for_the_longest_time_is_taken() -> None:
    with running(small_config(), **SIZES) as h:
        pair, inbox, host = h.frontend(), Inbox(), Host(h)
        adapters = [host.load(index, content=index + 1) for index in range(3)]
        places = h.state.array("adapter_places", "i4")
        for index in (0, 1, 0, 2):
            run_until_finished(h, inbox, [pair], [submit(h, pair, adapters[index])])
        assert sorted(places.tolist()) == [1, 3]
        uses = h.state.array("adapters", struct_dtype("AdapterUse"))
        assert uses["slot"][1] == 0


def test_others_go_on_while_an_adapter_is_copied_and_no_sequence_in_a_step_has_its_slot() -> None:
    with running(small_config(), **SIZES) as h:
        pair, inbox, host = h.frontend(), Inbox(), Host(h)
        adapters = [host.load(index, content=index + 1) for index in range(3)]
        other = submit(h, pair, adapters[0], count=30)
        for _ in range(3):
            h.step()
        h.step(finish=False)
        waiting = [submit(h, pair, adapter) for adapter in adapters[1:]]
        h.step(finish=False, copy=False)  # a step is in flight
        assert h.copy_order["ordered"] - h.copy_order["done"] == 1
        assert (int(h.copy_order["source"][0]), int(h.copy_order["target"][0])) == (1, 1)
        for _ in range(10):
            h.step(copy=False)
            assert adapters_in_step(h) == {0}
        inbox.drain(pair)
        assert len(inbox.tokens(other)) >= 10
        run_until_finished(h, inbox, [pair], [other, *waiting])
        assert inbox.tokens(other) == expected_tokens(PROMPT, 30, VOCAB)
        assert [inbox.tokens(each) for each in waiting] == [expected_tokens(PROMPT, 9, VOCAB)] * 2


def test_a_copy_stays_for_a_while_for_the_sequence_that_waited_for_it() -> None:
    with running(small_config(), num_adapters=4, num_adapter_slots=1) as h:
        pair, inbox, host = h.frontend(), Inbox(), Host(h)
        adapters = [host.load(index, content=index + 1) for index in range(2)]
        places = h.state.array("adapter_places", "i4")
        first = submit(h, pair, adapters[0])
        for _ in range(2):
            h.step(copy=False)
        second = submit(h, pair, adapters[1])
        for _ in range(5):
            h.step(copy=False)
            assert places.tolist() == [1]
        pair.cancel(first)  # it never ran
        run_until_finished(h, inbox, [pair], [first, second])
        assert places.tolist() == [2]
        assert inbox.tokens(second) == expected_tokens(PROMPT, 9, VOCAB)


def test_the_host_gets_an_adapter_back_only_when_it_is_no_longer_copied() -> None:
    with running(small_config(), **SIZES) as h:
        pair, inbox, host = h.frontend(), Inbox(), Host(h)
        adapter = host.load(2, content=1)
        sequence = submit(h, pair, adapter)
        for _ in range(2):
            h.step(copy=False)
        assert h.copy_order["ordered"] == 1
        pair.cancel(sequence)
        host.take_back(2)
        for _ in range(5):
            h.step(copy=False)
        assert (int(host.words[2]["num_users"]), int(host.words[2]["seen"])) == (0, adapter.generation)
        assert host.waits_for(2, 0)
        later = submit(h, pair, host.load(2, content=2))
        run_until_finished(h, inbox, [pair], [later])
        assert inbox.tokens(later) == expected_tokens(PROMPT, 9, VOCAB)


def test_a_prompt_meets_only_blocks_of_its_own_adapters_content_whatever_hashes_it_sends() -> None:
    with running(small_config(), **SIZES) as h:
        pair, inbox, host = h.frontend(), Inbox(), Host(h)
        first, other = host.load(0, content=1), host.load(1, content=2)

        def found(adapter: Held) -> int | None:
            sequence = submit(h, pair, adapter)
            run_until_finished(h, inbox, [pair], [sequence])
            assert inbox.tokens(sequence) == expected_tokens(PROMPT, 9, VOCAB)
            return inbox.cached(sequence)

        assert [found(first), found(first)] == [0, 24]
        assert [found(NO_ADAPTER), found(NO_ADAPTER)] == [0, 24]
        assert [found(other), found(other)] == [0, 24]
        host.take_back(1)
        assert host.waits_for(1, 0)
        same = host.load(1, content=2)
        assert found(same) == 24
        host.take_back(1)
        assert host.waits_for(1, 0)
        assert found(host.load(1, content=3)) == 0


def play(turns: int, step: Step = lib.blink_step) -> tuple[dict[int, list[int]], list[tuple[int, ...]]]:
    """Play random requests, reloads and slow copies; return what sequences that were taken have got, and all decisions.

    The harness checks the scheduler's invariants after each pass.
    """
    draw = random.Random(5)
    with running(small_config(max_num_seqs=4), num_blocks=14, step=step, **SIZES) as h:
        h.region.header["hash_key"] = range(16)  # the order of evictions must not hang on it
        pairs, inbox, host = [h.frontend(0), h.frontend(1)], Inbox(), Host(h)
        adapters = [host.load(index, content=index + 1) for index in range(4)]
        taken: dict[int, int] = {}
        wanted: dict[int, list[int]] = {}
        for turn in range(turns):
            pair = draw.choice(pairs)
            if pair.num_live < 8:
                prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 40))]
                adapter, count = draw.choice([NO_ADAPTER, *adapters]), draw.randrange(1, 20)
                sequence = submit(h, pair, adapter, prompt, count, salt=bytes([adapter.index + 1]))
                wanted[sequence << 1 | pairs.index(pair)] = expected_tokens(prompt, count, VOCAB)
                if draw.random() < 0.1:
                    pair.cancel(sequence)
                    del wanted[sequence << 1 | pairs.index(pair)]
            if draw.random() < 0.05 and not taken:
                index = draw.randrange(4)
                host.take_back(index)
                taken[index] = turn
            h.step(finish=draw.random() < 0.8, copy=draw.random() < 0.5)
            assert len(adapters_in_step(h)) <= 2
            for each in [index for index in taken if host.words[index]["seen"] == 0]:
                del taken[each]
                adapters[each] = host.load(each, content=draw.randrange(1, 6))
            _drain(pairs, inbox)
        for _ in range(600):
            h.step()
            _drain(pairs, inbox)
        ended = {key: inbox.tokens(key) for key in wanted if not refusals(inbox, key)}
        assert ended == {key: wanted[key] for key in ended}
        assert h.statistic("num_preemptions") > 0
        assert not host.words["num_users"].any()
        assert h.copy_order["ordered"] > turns // 20
        log = h.state.array("log", DECISION_LOG_ENTRY)[: h.log_count]
        return ended, [tuple(entry) for entry in log.tolist()]


def test_random_requests_reloads_and_preemptions_leave_every_count_right() -> None:
    ended, _ = play(500)
    assert len(ended) > 150


@pytest.mark.parametrize("count", [40, pytest.param(120, marks=pytest.mark.long)])
def test_any_number_of_lanes_pages_adapters_as_one_does(count: int, lane_steps: Callable[[int], Step]) -> None:
    assert play(count, lane_steps(3)) == play(count)


def _drain(pairs: list[QueuePair], inbox: Inbox) -> None:
    """Take what has arrived, each under its sequence and queue pair."""
    for number, pair in enumerate(pairs):
        pair.renew_lease()
        for completion in pair.drain().copy():
            inbox.completions.setdefault(int(completion["sequence"]) << 1 | number, []).append(completion)
        pair._free_tags.sort()  # completions of one step come in any order


def test_a_step_takes_the_graph_of_its_kind_for_adapters_only_where_a_row_has_one() -> None:
    geometry = build_geometry(small_config(), max_model_len=64, vocab_size=VOCAB, num_blocks=64, captures_larger=True)
    num_plain, num_graphs = int(geometry["num_plain_graphs"]), int(geometry["num_graphs"])
    sizes = {"graphs": geometry["graphs"], "num_graphs": num_graphs, "num_plain_graphs": num_plain}
    assert num_graphs == 2 * num_plain
    with running(small_config(), **SIZES, **sizes) as h:
        pair, inbox, host = h.frontend(), Inbox(), Host(h)
        adapter = host.load(1, content=1)
        plain = [submit(h, pair, NO_ADAPTER, count=20) for _ in range(2)]
        under = submit(h, pair, adapter, count=5)
        seen = set[tuple[bool, bool]]()
        for _ in range(40):
            launched = h.step() == StepResult.LAUNCHED
            inbox.drain(pair)
            if not launched:
                continue
            graph, has_adapter = int(h.batch[0]["graph"]), bool(adapters_in_step(h))
            assert (graph >= num_plain) == has_adapter
            size = h.geometry["graphs"][graph]
            assert int(h.batch[0]["num_tokens"]) <= size["tokens"] and int(h.batch[0]["num_rows"]) <= size["rows"]
            decodes = int(h.batch[0]["num_decode_rows"]) == int(h.batch[0]["num_rows"])
            assert (graph % num_plain < int(h.geometry["num_decode_graphs"])) == decodes
            seen.add((has_adapter, decodes))
        assert seen >= {(True, True), (True, False), (False, True)}
        assert inbox.tokens(under) == expected_tokens(PROMPT, 5, VOCAB)
        assert [inbox.tokens(each) for each in plain] == [expected_tokens(PROMPT, 20, VOCAB)] * 2
