# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a sequence become text and an end."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink.api.logprobs import LogprobFormat
from blink.config import FrontendConfig
from blink.models.weights.files import default_model_path
from blink.region.layout import FinishReason
from blink.sampling_params import SamplingParams
from blink.text.assets import load_assets
from blink.text.generation import Generation
from blink.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(not default_model_path().is_file(), reason="the default model is not downloaded")
EOS = 2
TEXT = "One fish, two fish, red fish, blue fish. 👩‍👩‍👧 Ünïcode!"


@cache
def tokenizer() -> Tokenizer:
    return load_assets(FrontendConfig()).tokenizer


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def generate(tokens: list[int], last: int, takes: set[int] = frozenset(), **params: Any) -> tuple[Generation, str]:  # type: ignore[assignment]
    """Feed tokens as the poller does, taking what is new after those in `takes`; return all text."""
    generation = Generation(0, tokenizer(), SamplingParams(max_tokens=500, **params), (EOS,))
    text = ""
    for place, token in enumerate(tokens):
        generation.add_token(token, -1.0, last if place == len(tokens) - 1 else FinishReason.NONE)
        if place in takes:
            text += generation.take().text
        if generation.finish_reason is not None:
            break
    return generation, text + generation.take().text


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 40)), st.sampled_from(["fish", "blue", "👩‍👩‍👧 Ü", "nothing", ". "]), st.booleans())
def test_however_it_is_taken_the_text_ends_at_the_stop_string(takes: set[int], stop: str, include: bool) -> None:
    generation, text = generate(
        encode(TEXT), FinishReason.LENGTH, takes, stop=[stop], include_stop_str_in_output=include
    )
    before, found, _ = TEXT.partition(stop)
    assert text == before + (found if include else "")
    assert generation.finish_reason == ("stop" if found else "length")
    assert generation.stop_reason == (stop if found else None)


def test_tokens_after_a_stop_string_do_not_count() -> None:
    generation, _ = generate(encode(TEXT), FinishReason.LENGTH, stop=["two"])
    assert generation.num_tokens == len(encode("One fish, two"))


def test_the_end_token_counts_but_is_no_text() -> None:
    tokens = [*encode("Hello"), EOS]
    generation, text = generate(tokens, FinishReason.STOP, skip_special_tokens=False)
    assert (text, generation.num_tokens) == ("Hello", len(tokens))
    assert (generation.finish_reason, generation.stop_reason) == ("stop", None)


def test_a_stop_token_is_the_stop_reason() -> None:
    tokens = encode("Hello world")
    generation, text = generate(tokens, FinishReason.STOP, stop_token_ids=[tokens[-1]])
    assert (text, generation.stop_reason) == ("Hello", tokens[-1])
    _, shown = generate(tokens, FinishReason.STOP, stop_token_ids=[tokens[-1]], include_stop_str_in_output=True)
    assert shown == "Hello world"


def test_stop_strings_are_not_searched_in_the_first_min_tokens() -> None:
    first = encode("One fish,")
    generation, text = generate(encode(TEXT), FinishReason.LENGTH, stop=["fish"], min_tokens=len(first))
    assert text == "One fish, two "
    assert generation.finish_reason == "stop"


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    tokens = encode("👩")[:-1]
    generation, text = generate(tokens, FinishReason.LENGTH, set(range(len(tokens) - 1)))
    assert (text, generation.finish_reason) == ("\ufffd", "length")


def test_logprobs_keep_pace_with_tokens_in_both_forms() -> None:
    generation = Generation(0, tokenizer(), SamplingParams(logprobs=1), (EOS,))
    tokens = encode("Hi 中")
    for token in tokens:
        generation.add_top_logprob(7, -0.25)
        generation.add_token(token, float("-inf"), FinishReason.NONE)
    entries = generation.take().logprobs
    form = LogprobFormat(tokenizer(), as_token_ids=False)
    chat = form.chat(entries)["content"]
    assert bytes(byte for entry in chat for byte in entry["bytes"]) == "Hi 中".encode()
    assert [entry["logprob"] for entry in chat] == [-9999.0] * len(tokens)
    assert all(entry["top_logprobs"][0]["logprob"] == -0.25 for entry in chat)
    completion = form.completion(entries, 10)
    assert completion["text_offset"][:2] == [10, 10 + len(completion["tokens"][0])]
    assert all(len(top) == 2 for top in completion["top_logprobs"])
    named = LogprobFormat(tokenizer(), as_token_ids=True).completion(entries, 0)
    assert named["tokens"] == [f"token_id:{token}" for token in tokens]
