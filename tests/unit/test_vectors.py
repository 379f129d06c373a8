# SPDX-License-Identifier: Apache-2.0
"""What clients get of vectors: dimensions, lengths, scores, and errors where the model made no numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from blink.errors import BadRequestError, BlinkError
from blink.region.layout import Task
from blink.request.vectors import PoolingParams, check_task, pair_up
from blink.sampling_params import SamplingParams
from blink.text.generation import Generation
from blink.text.tokenizer import NoTokenizer
from fake_engine import ENGINE

EMBEDDER = replace(ENGINE, task=Task.EMBED, vector_width=6, normalizes_vectors=True)
SCORER = replace(ENGINE, task=Task.SCORE, vector_width=1, normalizes_vectors=True)


def made_of(*values: float, reason: str = "stop") -> Generation:
    """Return a generation as the scheduler's completions leave it: in fours, filled up with 0."""
    generation = Generation(0, NoTokenizer(), SamplingParams(), ())
    padded = np.zeros(-(-len(values) // 4) * 4, np.float32)
    padded[: len(values)] = values
    for place in range(0, len(padded), 4):
        generation.add_values(place, padded[place : place + 4])
    generation.finish(reason)
    return generation


def test_embeddings_have_a_length_of_1_unless_that_is_switched_off() -> None:
    generation = made_of(3, 0, 0, 4, 0, 12)
    whole = PoolingParams().embedding_of(generation, EMBEDDER)
    assert whole.dtype == np.float32
    assert whole.tolist() == pytest.approx([3 / 13, 0, 0, 4 / 13, 0, 12 / 13])
    for params in (PoolingParams(use_activation=False), PoolingParams(normalize=False)):
        assert params.embedding_of(generation, EMBEDDER).tolist() == [3, 0, 0, 4, 0, 12]
    raw = replace(EMBEDDER, normalizes_vectors=False)
    assert PoolingParams().embedding_of(generation, raw).tolist() == [3, 0, 0, 4, 0, 12]
    assert PoolingParams(normalize=True).embedding_of(generation, raw).tolist() == whole.tolist()


def test_the_first_dimensions_have_a_length_of_1_again() -> None:
    generation = made_of(3, 0, 0, 4, 0, 12)
    assert PoolingParams(dimensions=4).embedding_of(generation, EMBEDDER).tolist() == pytest.approx([0.6, 0, 0, 0.8])
    assert PoolingParams(dimensions=3, normalize=False).embedding_of(generation, EMBEDDER).tolist() == [3, 0, 0]


def test_a_vector_of_zeros_stays_one() -> None:
    assert PoolingParams().embedding_of(made_of(*[0.0] * 6), EMBEDDER).tolist() == [0] * 6


def test_large_and_small_numbers_are_normalized_without_overflow() -> None:
    for size in (1e30, 1e-30):
        found = PoolingParams().embedding_of(made_of(*[size] * 6), EMBEDDER)
        expected = [1 / math.sqrt(6)] * 6 if size > 1 else [size / 1e-12] * 6
        assert found.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dimensions", [0, -1, 7])
def test_dimensions_that_the_model_does_not_have_are_refused(dimensions: int) -> None:
    with pytest.raises(BadRequestError, match="between 1 and 6") as refused:
        PoolingParams(dimensions=dimensions).check(EMBEDDER)
    assert refused.value.param == "dimensions"


@pytest.mark.parametrize(("logit", "expected"), [(0, 0.5), (2, 1 / (1 + math.exp(-2))), (-900, 0), (900, 1)])
def test_a_score_is_the_sigmoid_of_its_logit(logit: float, expected: float) -> None:
    assert PoolingParams().score_of(made_of(logit), SCORER) == pytest.approx(expected, abs=1e-12)
    assert PoolingParams(use_activation=False).score_of(made_of(logit), SCORER) == logit


@pytest.mark.parametrize(
    "generation", [made_of(reason="error"), made_of(1, 2, 3, 4), made_of(*[1.0] * 6, reason="abort")]
)
def test_what_is_no_whole_vector_is_an_error(generation: Generation) -> None:
    with pytest.raises(BlinkError, match="no finite numbers"):
        PoolingParams().embedding_of(generation, EMBEDDER)


def test_a_part_of_a_vector_in_the_wrong_place_is_noticed() -> None:
    generation = Generation(0, NoTokenizer(), SamplingParams(), ())
    with pytest.raises(ValueError, match="place 4"):
        generation.add_values(4, np.zeros(4, np.float32))


def test_an_engine_does_its_task_only() -> None:
    check_task(Task.EMBED, EMBEDDER)
    for task, engine in ((Task.GENERATE, EMBEDDER), (Task.SCORE, EMBEDDER), (Task.EMBED, SCORER), (Task.EMBED, ENGINE)):
        with pytest.raises(BadRequestError, match="This server's model"):
            check_task(task, engine)


def test_pairs() -> None:
    assert pair_up(["q"], ["a", "b"]) == [("q", "a"), ("q", "b")]
    assert pair_up(["q", "r"], ["a", "b"]) == [("q", "a"), ("r", "b")]
    for first, second in ((["q", "r"], ["a"]), (["q", "r"], ["a", "b", "c"]), ([], ["a"]), (["q"], [])):
        with pytest.raises(BadRequestError):
            pair_up(first, second)


def test_the_longest_prompt_leaves_a_place_for_a_token_where_one_follows() -> None:
    assert ENGINE.longest_prompt == ENGINE.max_model_len - 1
    assert EMBEDDER.longest_prompt == SCORER.longest_prompt == ENGINE.max_model_len
