# SPDX-License-Identifier: Apache-2.0
"""Beam search: against an exhaustive search where the beams hold all sequences, and by hand where they do not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest

from blink.beam_search_params import BeamSearchParams
from blink.errors import BadRequestError, BlinkError
from blink.request.beam_search import Beam, Tokens, position_of, run_steps, scoring_params, search
from blink.sampling_params import SamplingParams
from blink.text.generation import Generation, TokenLogprob
from blink.text.tokenizer import NoTokenizer

END = 2
Model = Mapping[int, Mapping[int, float]]  # how likely tokens are behind a last one
# What a made-up model finds likely behind each last token, the likeliest first.
LIKELY: Model = {1: {5: -0.5, 6: -1.0}, 5: {2: -3.0, 7: -2.0}, 6: {2: -0.25, 7: -0.5}, 7: {7: -0.5, 2: -1.0}}


def find(model: Model, *prompts: list[int], **options: Any) -> list[list[Beam]]:
    def score(sequences: list[Tokens]) -> list[TokenLogprob]:
        tops = [[*model[int(tokens[-1])].items()] for tokens in sequences]
        return [TokenLogprob(*top[0], top) for top in tops]

    params = BeamSearchParams(**dict[str, Any](beam_width=2, max_tokens=2, length_penalty=0.0) | options)
    return run_steps(search([np.array(prompt, np.int32) for prompt in prompts], params, (END,)), score)


def shown(beams: list[Beam]) -> list[tuple[list[int], float, int | None]]:
    return [(beam.tokens.tolist(), beam.cum_logprob, beam.end) for beam in beams]


def test_the_likeliest_sequences_are_found() -> None:
    [beams] = find(LIKELY, [1])
    assert shown(beams) == [([1, 6], -1.25, END), ([1, 6, 7], -1.5, None)]
    assert [entry.token for entry in beams[0].logprobs] == [6, END]
    assert [entry.top for entry in beams[1].logprobs] == [[*LIKELY[1].items()], [*LIKELY[6].items()]]
    [beams] = find(LIKELY, [1], include_stop_str_in_output=True)
    assert shown(beams)[0] == ([1, 6, END], -1.25, END)
    [beams] = find(LIKELY, [1], ignore_eos=True)
    assert [beam.tokens.tolist() for beam in beams] == [[1, 6, END], [1, 6, 7]]
    # A greedy search goes by 5.
    [beams] = find(LIKELY, [1], beam_width=1)
    assert beams[0].tokens.tolist() == [1, 5, 7]


def test_prompts_are_searched_each_for_itself() -> None:
    together = find(LIKELY, [1], [1, 7], [6], max_tokens=4)
    assert [shown(beams) for beams in together] == [
        shown(find(LIKELY, prompt, max_tokens=4)[0]) for prompt in ([1], [1, 7], [6])
    ]


def test_early_stopping_ends_when_enough_sequences_are_complete() -> None:
    model = {1: {END: -3.0, 5: -0.1}, 5: {END: -3.0, 6: -0.1}, 6: {END: -0.1, 6: -3.0}}
    options = {"beam_width": 1, "max_tokens": 3}
    assert shown(find(model, [1], early_stopping=True, **options)[0]) == [([1], -3.0, END)]
    [[best]] = find(model, [1], **options)
    assert (best.tokens.tolist(), best.end) == ([1, 5, 6], END) and best.cum_logprob == pytest.approx(-0.3)


def all_sequences(model: Model, prompt: list[int], max_tokens: int, penalty: float) -> dict[tuple[int, ...], float]:
    """Return the score of each sequence that ends, or has max_tokens."""
    found: dict[tuple[int, ...], float] = {}
    for length in range(1, max_tokens + 1):
        for tokens in product(model, repeat=length):
            is_complete = tokens[-1] == END
            if END in tokens[:-1] or (not is_complete and length < max_tokens):
                continue
            places = zip([prompt[-1], *tokens], tokens, strict=False)
            total = sum(model[before][token] for before, token in places)
            counted = len(prompt) + length - is_complete
            found[tokens] = total / counted**penalty
    return found


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(5))
def test_ten_beams_of_three_tokens_find_what_an_exhaustive_search_finds(penalty: float, seed: int) -> None:
    rng = random.Random(seed)
    model = {last: {token: -rng.random() for token in (1, END, 3)} for last in (1, END, 3)}
    [beams] = find(model, [3, 1], beam_width=10, max_tokens=3, length_penalty=penalty)
    scores = all_sequences(model, [3, 1], 3, penalty)
    found = [tuple(entry.token for entry in beam.logprobs) for beam in beams]
    assert len(set(found)) == 10  # of equal ones, any
    assert [scores[tokens] for tokens in found] == pytest.approx(sorted(scores.values(), reverse=True)[:10])
    assert [beam.score for beam in beams] == pytest.approx([scores[tokens] for tokens in found])


def test_a_step_asks_for_twice_as_many_tokens_as_there_are_beams() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    assert (scoring_params(params).logprobs, scoring_params(params).max_tokens) == (6, 1)
    asked = SamplingParams(logprobs=9, best_effort=True, priority=3, tpot_target_ms=5)
    step = scoring_params(params, asked)
    assert (step.logprobs, step.best_effort, step.priority, step.tpot_target_ms) == (9, True, 3, 5)


def test_a_step_without_valid_logits_is_an_error() -> None:
    with pytest.raises(BlinkError, match="logits"):
        position_of(Generation(0, NoTokenizer(), SamplingParams(logprobs=2), ()))


@pytest.mark.parametrize(
    ("name", "value"), [("beam_width", 0), ("beam_width", 11), ("max_tokens", 0), ("length_penalty", 11)]
)
def test_a_beam_search_of_no_sense_is_refused_by_name(name: str, value: int) -> None:
    options: dict[str, Any] = {"beam_width": 2, "max_tokens": 5, name: value}
    with pytest.raises(BadRequestError) as caught:
        BeamSearchParams(**options)
    assert caught.value.param == name
