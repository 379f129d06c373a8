# SPDX-License-Identifier: Apache-2.0
"""Steps sized by what they cost: a simulated machine whose times the table first does not know, and then does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness import MILLISECOND, Harness, Inbox, QueuePair, run_until_finished, running, small_config, submit
from test_scheduler_classes import VOCAB, newest, prompt_of

CONFIG = small_config(max_num_batched_tokens=512, max_num_seqs=8, max_sequences_per_worker=32)
SIZES = {"num_blocks": 400, "max_model_len": 600}
Milliseconds = Callable[[int], float]  # of a step, by its tokens


def true_ms(tokens: int) -> float:
    """The machine: padded steps, of which small ones all take what reading the weights takes."""
    return max(4.0, 0.02 * tokens + 2.5)


def fill(h: Harness, factor: float = 1.0, decoding: Milliseconds = true_ms, mixed: Milliseconds = true_ms) -> None:
    for graph in range(int(h.geometry["num_graphs"])):
        of_tokens = decoding if graph < int(h.geometry["num_decode_graphs"]) else mixed
        cost = of_tokens(int(h.geometry["graphs"][graph]["tokens"])) * factor
        h.costs[graph] = (int(cost * MILLISECOND), 0, 1)


def run_step(h: Harness, pair: QueuePair, inbox: Inbox) -> int:
    """Run a pass, for as long as the machine takes for the step before; return the tokens of the step it launches."""
    inbox.drain(pair)
    graph = int(h.scheduler["account"]["graph"])
    h.step(true_ms(int(h.geometry["graphs"][graph]["tokens"])))
    return int(h.batch[0]["num_tokens"])


def start_decoding(h: Harness, count: int = 4) -> tuple[QueuePair, Inbox, list[int]]:
    pair, inbox = h.frontend(), Inbox()
    sequences = [submit(h, pair, prompt_of(5, i), max_tokens=300) for i in range(count)]
    while run_step(h, pair, inbox) != count:
        pass
    return pair, inbox, sequences


@pytest.mark.parametrize(("target_ms", "graph"), [(0, 224), (5.2, 128), (9, 320), (100, 512), (1, 16)])
def test_a_prompt_takes_what_its_graph_holds_within_the_target(target_ms: float, graph: int) -> None:
    """Four rows decode in 4 ms, so 7.5 ms is the automatic target; one block of the prompt always gets ahead."""
    with running(CONFIG, **SIZES, step_target_ns=int(target_ms * MILLISECOND)) as h:
        fill(h)
        pair, inbox, _ = start_decoding(h)
        submit(h, pair, prompt_of({1: 30, 5.2: 400}.get(target_ms, 520)), max_tokens=2, cached=False)
        assert run_step(h, pair, inbox) == 4
        assert run_step(h, pair, inbox) == graph


@pytest.mark.parametrize(
    ("patient_steps", "prompt", "tokens"),
    [(0, 256, 512), (16, 256, 48), (32, 256, 24), (32, 100, 16), (64, 100, 8), (64, 10, 8), (0, 100, 224)],
)
def test_a_patient_engine_spreads_prompts_over_many_steps(patient_steps: int, prompt: int, tokens: int) -> None:
    """Prompt tokens that cost as much in small steps: without patience one step takes all that fit next to the rows."""
    linear = lambda count: 1.0 * count  # noqa: E731
    with running(CONFIG, **SIZES, patient_steps=patient_steps) as h:
        fill(h, decoding=linear, mixed=linear)
        pair, inbox, _ = start_decoding(h)
        fill(h, decoding=linear, mixed=linear)
        for i in range(2):
            submit(h, pair, prompt_of(prompt, i + 30), max_tokens=2, cached=False)
        inbox.drain(pair)
        h.step(4)
        h.step(4)
        assert int(h.geometry["graphs"][int(h.batch[0]["graph"])]["tokens"]) == tokens


@pytest.mark.parametrize(("patient_steps", "tokens"), [(64, 24), (0, 32)])
def test_a_patient_engine_holds_decoding_up_by_half_at_most(patient_steps: int, tokens: int) -> None:
    """Four rows decode in 4 ms: a step of 24 tokens takes 6 ms, one of 32 tokens 7 ms."""
    with running(CONFIG, **SIZES, patient_steps=patient_steps) as h:
        fill(h, mixed=lambda count: 3 + count / 8)
        pair, inbox, _ = start_decoding(h)
        fill(h, mixed=lambda count: 3 + count / 8 if count <= 32 else 10.0 * count)
        submit(h, pair, prompt_of(40), max_tokens=2, cached=False)
        assert run_step(h, pair, inbox) == 4
        assert run_step(h, pair, inbox) == tokens


def mixed_ms(tokens: int) -> float:
    """A machine on which prompt tokens beside four that decode in 2 ms are the cheapest in steps of 256 tokens."""
    return 3 + tokens / 51.2 if tokens <= 128 else 5.5 + (tokens - 128) / 64 if tokens <= 256 else tokens * 7.5 / 256


@pytest.mark.parametrize(
    ("decoding_ms", "target_ms", "best_effort", "graph"),
    [(2, 0, False, 256), (2, 0, True, 32), (0.92, 0, False, 224), (6.1, 0, False, 384), (2, 5, False, 80)],
)
def test_a_step_is_longer_where_that_makes_prompt_tokens_cheaper(
    decoding_ms: float, target_ms: int, best_effort: bool, graph: int
) -> None:
    """Up to eight times what decoding takes, and no shorter than 15/8 of it. A target is kept, and best-effort prompts
    make no step longer for urgent sequences."""
    with running(CONFIG, **SIZES, step_target_ns=target_ms * MILLISECOND) as h:
        pair, inbox, _ = start_decoding(h)
        submit(h, pair, prompt_of(385), max_tokens=2, cached=False, best_effort=best_effort)
        for expected in (4, graph):
            fill(h, decoding=lambda _: decoding_ms, mixed=mixed_ms)
            inbox.drain(pair)
            h.step(decoding_ms)
            assert int(h.batch[0]["num_tokens"]) == expected


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_a_prompt_with_logprobs_makes_others_wait_no_longer(num_top: int | None) -> None:
    with running(CONFIG, **SIZES) as h:
        fill(h)
        pair, inbox, decoding = start_decoding(h)
        for length, tokens in ((3, 16), (40, 64), (520, 256)):
            sequence = submit(h, pair, prompt_of(length, 9), max_tokens=1, prompt_logprobs=num_top, cached=False)
            while inbox.finish(sequence) is None:
                run_step(h, pair, inbox)
                num_tokens, graph = int(h.batch[0]["num_tokens"]), int(h.batch[0]["graph"])
                assert int(h.geometry["graphs"][graph]["tokens"]) <= tokens
                assert (graph >= int(h.geometry["first_scoring_graph"])) == (num_top is not None and num_tokens > 4)
        assert not any(inbox.finish(other) for other in decoding)


def test_with_nobody_decoding_a_prompt_takes_all_that_a_step_holds() -> None:
    with running(CONFIG, **SIZES, step_target_ns=MILLISECOND) as h:
        fill(h)
        pair, inbox = h.frontend(), Inbox()
        submit(h, pair, prompt_of(550), max_tokens=2)
        assert run_step(h, pair, inbox) == 512


def test_under_a_long_queue_the_target_gives_way() -> None:
    """Six steps should do for the prompts that wait: 1,560 tokens ask for 260 beside the four that decode."""
    with running(CONFIG, **SIZES, step_target_ns=5 * MILLISECOND) as h:
        fill(h)
        pair, inbox, _ = start_decoding(h)
        for i in range(3):
            submit(h, pair, prompt_of(520, i), max_tokens=2, cached=False)
        run_step(h, pair, inbox)
        assert run_step(h, pair, inbox) == 320


def test_a_burst_is_taken_as_a_whole_eight_times_and_then_once_in_128_steps() -> None:
    """The usual step has 220 tokens beside those that decode; five times as many are less than the 1,140 that wait."""
    with running(CONFIG, **SIZES) as h:
        fill(h)
        pair, inbox, _ = start_decoding(h)

        def largest_step() -> int:
            burst = [submit(h, pair, prompt_of(380, i), max_tokens=1, cached=False) for i in range(3)]
            sizes = [run_step(h, pair, inbox)]
            while any(inbox.finish(sequence) is None for sequence in burst):
                sizes.append(run_step(h, pair, inbox))
            assert sum(size > 224 for size in sizes) <= 1
            return max(sizes)

        assert [largest_step() for _ in range(9)] == [512] * 8 + [224]
        for _ in range(128):
            run_step(h, pair, inbox)
        assert [largest_step() for _ in range(2)] == [512, 224]


@pytest.mark.parametrize(("prompts", "tokens"), [(3, 80), (32, 224)])
def test_an_urgent_target_gives_way_later(prompts: int, tokens: int) -> None:
    config = small_config(max_num_batched_tokens=512, max_num_seqs=8, max_sequences_per_worker=64)
    options = {"step_target_ns": 5 * MILLISECOND, "urgent_tpot_target_ns": 4_100_000}
    with running(config, **SIZES, **options) as h:
        fill(h)
        pair, inbox, _ = start_decoding(h)
        for i in range(prompts):
            submit(h, pair, prompt_of(200, i), max_tokens=2, cached=False)
        for _ in range(4):  # no more than 16 are taken in by one pass
            h.step(finish=False)
        h.finish()
        assert run_step(h, pair, inbox) == tokens


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_wrong_table_is_corrected_by_what_steps_take(factor: float) -> None:
    with running(CONFIG, **SIZES) as h:
        fill(h, factor)
        pair, inbox, sequences = start_decoding(h)
        for i in range(240):
            if i % 3 == 0:
                sequences.append(submit(h, pair, prompt_of(9, i % VOCAB), max_tokens=1))
            run_step(h, pair, inbox)
        used = {int(entry["graph"]) for entry in h.region.trace() if int(entry["step"]) > 100}
        assert len(used) > 1
        for graph in used:
            truth = true_ms(int(h.geometry["graphs"][graph]["tokens"])) * MILLISECOND
            assert abs(int(h.costs[graph]["base_ns"]) - truth) < 0.1 * truth


def test_a_pause_of_the_machine_moves_the_table_by_an_eighth_at_most() -> None:
    with running(CONFIG, **SIZES) as h:
        fill(h)
        pair, inbox, _ = start_decoding(h)
        before = h.costs.copy()
        h.step(2000)
        run_step(h, pair, inbox)
        moved = h.costs["base_ns"] / before["base_ns"]
        assert moved.max() < 1.13


def test_without_a_table_nothing_is_measured_or_predicted() -> None:
    with running(CONFIG, **SIZES) as h:
        pair, inbox, sequences = start_decoding(h)
        run_until_finished(h, inbox, [pair], sequences)
        assert not h.costs["base_ns"].any() and not newest(h)["predicted_ns"]


def test_equal_times_lead_to_equal_tables_and_steps() -> None:
    def run() -> tuple[bytes, bytes]:
        with running(CONFIG, **SIZES) as h:
            fill(h, 2.0)
            pair, inbox, sequences = start_decoding(h)
            sequences += [submit(h, pair, prompt_of(50, i), max_tokens=9, cached=False) for i in range(12)]
            while any(inbox.finish(sequence) is None for sequence in sequences[4:]):
                run_step(h, pair, inbox)
            log = h.decision_log()
            return h.costs.tobytes(), np.stack([log[name] for name in log.dtype.names or ()]).tobytes()

    assert run() == run()
