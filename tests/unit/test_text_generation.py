# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a sequence become text and an end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink.api.openai.logprobs import LogprobFormat
from blink.region.layout import FinishReason
from blink.sampling_params import SamplingParams
from blink.text.generation import Generation, TokenLogprob
from blink.text.message.formats import CALL_FORMATS
from blink.text.message.parser import MessageForm
from blink.text.message.reasoning_formats import REASONING_FORMATS
from blink.text.tokenizer import NoTokenizer, Tokenizer
from small_tokenizer import load_small_assets

EOS = 2
TEXT = "One fish, two fish, red fish, blue fish. 👩‍👩‍👧 Ünïcode!"


@cache
def tokenizer() -> Tokenizer:
    return load_small_assets().tokenizer


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
    assert [next(iter(top)) for top in completion["top_logprobs"]] == completion["tokens"]  # itself first
    assert [next(iter(top)) for top in form.prompt(entries)[1:] if top] == [str(token) for token in tokens]
    named = LogprobFormat(tokenizer(), as_token_ids=True).completion(entries, 0)
    assert named["tokens"] == [f"token_id:{token}" for token in tokens]


def logprobs_of(names: Sequence[bytes], logprob: float = -3.0) -> dict[str, float]:
    """The alternatives of a token by its bytes, the first of which was sampled."""
    ids = [BYTES_OF.setdefault(name, len(BYTES_OF)) for name in names]
    top = [(token, -1.0 - place) for place, token in enumerate(ids[1:])]
    form = LogprobFormat(NamedBytes(), as_token_ids=False)
    return form.completion([TokenLogprob(ids[0], logprob, top)], 0)["top_logprobs"][0]


BYTES_OF: dict[bytes, int] = {}


class NamedBytes(NoTokenizer):
    """Tokens that are only looked up: their bytes, and names that tell them apart."""

    def token_bytes(self, token: int) -> bytes:
        return list(BYTES_OF)[token].rstrip(b"*")

    def token_name(self, token: int) -> str:
        return f"name {token}" if list(BYTES_OF)[token].startswith(b"named") else ""


def test_no_alternative_of_a_token_is_dropped_or_has_the_value_of_another() -> None:
    half = logprobs_of([b"\xe6", b"\xe7\x9a", b"\xf0", b"x"])
    assert half == {"\ufffd": -3.0, "bytes:\\xe7\\x9a": -1.0, "bytes:\\xf0": -2.0, "x": -3.0}
    same = logprobs_of([b"named", b"named*", b"y", b"y*"])
    named, unnamed = BYTES_OF[b"named*"], BYTES_OF[b"y*"]
    assert same == {"named": -3.0, f"name {named}": -1.0, "y": -2.0, f"token_id:{unnamed}": -3.0}
    unknown = logprobs_of([b"", b"*", b"**"])
    assert list(unknown.values()) == [-3.0, -1.0, -2.0]


def test_a_sampled_token_among_the_alternatives_is_listed_once() -> None:
    form = LogprobFormat(tokenizer(), as_token_ids=True)
    entry = TokenLogprob(5, -0.5, [(5, -0.5), (6, -1.0)])
    assert form.completion([entry], 0)["top_logprobs"] == [{"token_id:5": -0.5, "token_id:6": -1.0}]


def test_without_tokens_to_generate_the_first_is_dropped_and_the_scores_stay() -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=1, stop=["x"])
    generation = Generation(0, tokenizer(), params, (EOS,), encode("Hi 中")[:-1])
    generation.add_prompt_logprob(7, -1.5)
    generation.add_top_logprob(8, -0.1)
    generation.add_token(EOS, -0.1, FinishReason.STOP)
    assert (generation.num_tokens, generation.finish_reason, generation.stop_reason) == (0, "length", None)
    assert generation.take() == ("", [], [])
    assert [entry.token for entry in generation.prompt_logprobs] == [7]
    assert params.native_values(0)["max_tokens"] == 1


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "1; 2"}}\n</tool_call>'
FORM = MessageForm(calls=CALL_FORMATS["hermes"], names=frozenset({"f"}), reasoning=REASONING_FORMATS["qwen3"])


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (CALL, ";", None),
        (CALL, "\n", None),
        (CALL, "f", None),
        (CALL, "tool", None),
        (CALL + "\n" + CALL, "\n<", None),
        (f"Yes; {CALL}", ";", "Yes"),
        (f"{CALL}\nSo; it is", "; it", f"{CALL}\nSo"),
        (f"{CALL}\nSo; it is", "\nS", CALL),
        (f"<think>1; 2</think>{CALL}", ";", "<think>1"),
        (f"<think>{CALL}</think>{CALL}", "</think>", f"<think>{CALL}"),
        ("<tool_call>no; call", ";", "<tool_call>no"),
        ("a < b, <tool", "<tool", "a < b, "),
        ('<tool_call>{"name": "f", "arg', "name", '<tool_call>{"'),
    ],
)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_stop_string_ends_text_but_no_call(text: str, stop: str, expected: str | None, size: int) -> None:
    params = SamplingParams(stop=[stop], max_tokens=500, skip_special_tokens=False)
    generation = Generation(0, tokenizer(), params, (EOS,), (), FORM)
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    tokens = [token for piece in pieces for token in encode(piece)]
    for token in tokens:
        if generation.finish_reason is None:
            generation.add_token(token, -1.0, FinishReason.NONE)
    if generation.finish_reason is None:
        generation.add_token(EOS, -1.0, FinishReason.STOP)
    assert generation.take().text == (text if expected is None else expected)
    assert generation.stop_reason == (None if expected is None else stop)
