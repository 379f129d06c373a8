# SPDX-License-Identifier: Apache-2.0
"""Pooling: each prompt's vector is delivered once, whole and in order, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from blink.engine.geometry import build_geometry
from blink.region.layout import CONSTANTS, VECTOR_CQE, CqeKind, FinishReason, RejectCode, Task
from harness import Harness, Inbox, expected_tokens, run_until_finished, running, small_config, submit

VOCAB, WIDTH = 97, 10
EACH = -(-WIDTH // CONSTANTS["values_of_cqe"])  # completions of a vector


@contextmanager
def pooling(config: Any = None, **sizes: int) -> Iterator[Harness]:
    options = {"task": Task.EMBED, "vector_width": WIDTH, "cq_entries": 256, "prefix_caching": 0}
    with running(config or small_config(), **(options | sizes)) as harness:
        yield harness


def make_prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * i + 5 * i + salt) % VOCAB for i in range(length)]


def ask(h: Harness, pair: Any, prompt: list[int], **params: Any) -> int:
    params.setdefault("max_tokens", 1)
    return submit(h, pair, prompt, cached=False, **params)


def check_vector(inbox: Inbox, sequence: int, prompt: list[int]) -> None:
    """A vector's parts come in order, then the end; the numbers are those that the fake model makes of the prompt."""
    kinds = [c["kind"] for c in inbox.completions[sequence]]
    assert kinds == [CqeKind.ADMITTED, *[CqeKind.VECTOR] * EACH, CqeKind.FINISHED]
    assert inbox.finish(sequence) == FinishReason.STOP
    parts = np.stack(inbox.of_kind(sequence, CqeKind.VECTOR)).view(VECTOR_CQE)
    assert parts["index"].tolist() == list(range(0, 4 * EACH, 4))
    expected = expected_tokens(prompt, 1, VOCAB)[0] + np.arange(WIDTH) / 8
    values = parts["values"].ravel()
    assert values[:WIDTH].tolist() == expected.tolist()
    assert not values[WIDTH:].any()


def check_empty(h: Harness) -> None:
    """Nothing is left of all prompts: no block, no slot, no cached prefix."""
    h.step()
    assert h.scheduler["num_free_blocks"] == h.geometry["num_blocks"]
    assert h.scheduler["num_free_slots"] == h.geometry["num_slots"]
    assert h.statistic("num_blocks_cached") == h.statistic("generation_tokens") == 0


@pytest.mark.parametrize("length", [1, 2, 8, 31, 32, 33, 63, 64])
def test_a_vector_of_a_prompt_in_chunks_arrives_whole(length: int) -> None:
    """64 tokens are all that a sequence may have: no place is kept for a generated one."""
    with pooling(small_config(max_num_batched_tokens=16)) as h:
        pair, inbox, prompt = h.frontend(), Inbox(), make_prompt(length)
        sequence = ask(h, pair, prompt)
        run_until_finished(h, inbox, [pair], [sequence])
        check_vector(inbox, sequence, prompt)
        check_empty(h)


def test_short_prompts_of_two_frontends_share_steps() -> None:
    with pooling(small_config(max_num_seqs=8)) as h:
        pairs, inboxes = [h.frontend(0), h.frontend(1)], [Inbox(), Inbox()]
        prompts = [make_prompt(4, salt) for salt in range(8)]
        asked = [[ask(h, pair, prompt) for prompt in prompts] for pair in pairs]
        launches = h.num_launches
        for _ in range(30):
            h.step()
        assert h.num_launches - launches <= 3, "sixteen prompts of four tokens take two steps of 32"
        for pair, inbox, sequences in zip(pairs, inboxes, asked, strict=True):
            inbox.drain(pair)
            for sequence, prompt in zip(sequences, prompts, strict=True):
                check_vector(inbox, sequence, prompt)
        check_empty(h)


@pytest.mark.parametrize("length", [20, 4], ids=["one end a step", "two ends a step"])
def test_vectors_wait_for_a_frontend_that_does_not_read(length: int) -> None:
    with pooling(small_config(max_num_seqs=2), cq_entries=16) as h:
        pair, inbox = h.frontend(), Inbox()
        prompts = [make_prompt(length, salt) for salt in range(6)]
        sequences = [ask(h, pair, prompt) for prompt in prompts]
        for _ in range(40):
            h.step()
        assert 0 < int(h.queue_pairs[0]["num_live"]) < 6, "it went on without room, or did nothing"
        run_until_finished(h, inbox, [pair], sequences)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            check_vector(inbox, sequence, prompt)
        check_empty(h)


def test_what_makes_way_for_an_urgent_prompt_is_computed_again() -> None:
    with pooling(small_config(max_num_batched_tokens=16), num_blocks=9) as h:
        pair, inbox = h.frontend(), Inbox()
        prompts = [make_prompt(60, salt) for salt in range(2)]
        first = ask(h, pair, prompts[0], best_effort=True)
        h.step()
        urgent = ask(h, pair, prompts[1])
        run_until_finished(h, inbox, [pair], [first, urgent])
        assert h.statistic("num_preemptions") == 1
        assert [*inbox.completions[first]][-1]["time_ns"] > [*inbox.completions[urgent]][-1]["time_ns"]
        for sequence, prompt in zip([first, urgent], prompts, strict=True):
            check_vector(inbox, sequence, prompt)
        check_empty(h)


def test_a_vector_that_is_none_ends_its_sequence_alone() -> None:
    with pooling() as h:
        pair, inbox = h.frontend(), Inbox()
        prompts = [make_prompt(5, salt) for salt in range(3)]
        sequences = [ask(h, pair, prompt) for prompt in prompts]
        h.step(finish=False)
        h.step_array("sampled_tokens", "i4")[1] = CONSTANTS["invalid_logits"]
        h.finish()
        run_until_finished(h, inbox, [pair], sequences)
        spoiled = [sequence for sequence in sequences if inbox.finish(sequence) == FinishReason.ERROR]
        assert len(spoiled) == 1
        assert not inbox.of_kind(spoiled[0], CqeKind.VECTOR)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            if sequence not in spoiled:
                check_vector(inbox, sequence, prompt)
        check_empty(h)


def test_a_cancelled_prompt_gets_no_vector() -> None:
    with pooling(small_config(max_num_batched_tokens=16)) as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, make_prompt(40))
        h.step()
        pair.cancel(sequence)
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.finish(sequence) == FinishReason.ABORT
        assert not inbox.of_kind(sequence, CqeKind.VECTOR)
        check_empty(h)


@pytest.mark.parametrize("params", [{"max_tokens": 2}, {"logprobs": 1}, {"prompt_logprobs": 0}])
def test_what_only_generated_tokens_have_is_refused(params: dict[str, int]) -> None:
    with pooling() as h:
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, make_prompt(5), **params)
        h.step()
        inbox.drain(pair)
        rejected = inbox.of_kind(sequence, CqeKind.REJECTED)
        assert [c["token"] for c in rejected] == [RejectCode.POOLING]


@pytest.mark.parametrize(("width", "longest"), [(WIDTH, 64), (0, 63)])
def test_a_prompt_fills_the_context_only_where_nothing_follows(width: int, longest: int) -> None:
    with pooling(vector_width=width) as h:
        pair, inbox = h.frontend(), Inbox()
        fits, too_long = ask(h, pair, make_prompt(longest)), ask(h, pair, make_prompt(longest + 1))
        run_until_finished(h, inbox, [pair], [fits, too_long])
        assert inbox.finish(fits) in (FinishReason.STOP, FinishReason.LENGTH)
        assert [c["token"] for c in inbox.of_kind(too_long, CqeKind.REJECTED)] == [RejectCode.PROMPT_LENGTH]


def test_the_queue_of_completions_holds_the_vectors_of_two_full_steps() -> None:
    config = small_config(max_num_seqs=4, max_sequences_per_worker=8)
    sizes: Any = {"max_model_len": 64, "vocab_size": VOCAB, "num_blocks": 64}
    geometry = build_geometry(config, **sizes, others={"vector_width": 1024, "task": Task.EMBED})
    assert int(geometry["cq_entries"]) >= 2 * 4 * (1024 // 4 + 1) + 8
    assert geometry["first_scoring_graph"] == geometry["num_graphs"], "no graph of prompt logprobs is captured"
