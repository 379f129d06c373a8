# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenization against decoding the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from blink.text.detokenizer import StreamDetokenizer
from blink.text.tokenizer import Tokenizer
from make_tokenizer import VOCAB_SIZE
from small_tokenizer import load_small_assets

EMOJI = "👩‍👩‍👧‍👦 中文 é"


@cache
def byte_level() -> Tokenizer:
    return load_small_assets().tokenizer


@cache
def byte_fallback() -> Backend:
    """A SentencePiece-like tokenizer: spaces as a letter, unknown characters as bytes."""
    words = ["▁", "a", "b", "▁a", "ab", "▁ab", "é"]
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    return backend


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30), st.booleans())
def test_byte_level_pieces_add_up_to_the_whole(tokens: list[int], skip: bool) -> None:
    detokenizer = byte_level().open_detokenizer(skip_special_tokens=skip)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.finish()
    assert text == byte_level().decode(tokens, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_byte_level_never_emits_a_part_of_a_character(text: str) -> None:
    detokenizer = byte_level().open_detokenizer(skip_special_tokens=False)
    seen = ""
    for token in byte_level().encode(text, add_special_tokens=False):
        seen += detokenizer.push(token)
        assert text.startswith(seen)
    assert seen + detokenizer.finish() == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "ab", " ", "é", "中", "👩", "<s>", "\x00", "  b"]), max_size=12), st.booleans())
def test_stream_pieces_add_up_to_the_whole(words: list[str], skip: bool) -> None:
    tokens = byte_fallback().encode("".join(words)).ids
    detokenizer = StreamDetokenizer(byte_fallback(), skip)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.finish()
    assert text == byte_fallback().decode(tokens, skip_special_tokens=skip)


def test_an_unfinished_character_ends_as_a_replacement_character() -> None:
    tokens = byte_level().encode(EMOJI, add_special_tokens=False)
    detokenizer = byte_level().open_detokenizer(skip_special_tokens=False)
    assert detokenizer.push(tokens[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_unknown_ids_are_left_out() -> None:
    detokenizer = byte_level().open_detokenizer(skip_special_tokens=False)
    assert detokenizer.push(10**6) + detokenizer.finish() == ""


@cache
def metaspace() -> Backend:
    """The same tokens, put together as T5's and others' are."""
    backend = Backend.from_str(byte_fallback().to_str())
    backend.decoder = decoders.Metaspace()
    return backend


@pytest.mark.parametrize("backend", [byte_fallback, metaspace])
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "ab b", " ", "b a b"]), min_size=1, max_size=9),
    st.integers(0, 12),
    st.lists(st.sampled_from(["a", "ab", " ", "  b", " a"]), max_size=9),
)
def test_an_answer_is_what_the_whole_text_has_behind_the_prompt(
    backend: Callable[[], Backend], words: list[str], num_special: int, answer: list[str]
) -> None:
    """Also where special tokens, which are not shown, stand between them."""
    prompt = [*backend().encode("".join(words)).ids, *[0] * num_special]
    tokens = backend().encode("".join(answer)).ids
    detokenizer = Tokenizer(backend()).open_detokenizer(skip_special_tokens=True, before=prompt)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.finish()
    assert backend().decode(prompt) + text == backend().decode(prompt + tokens)


@pytest.mark.parametrize("size", [0, 1, 40])
def test_the_first_word_has_its_space_behind_a_prompt_only(size: int) -> None:
    prompt = np.array([byte_fallback().token_to_id("ab")] * size + [0] * size, np.int32)
    detokenizer = Tokenizer(byte_fallback()).open_detokenizer(skip_special_tokens=True, before=prompt)
    word = byte_fallback().token_to_id("▁ab")
    assert word is not None
    assert [detokenizer.push(word), detokenizer.push(word)] == [" ab" if size else "ab", " ab"]


def test_a_prompt_written_in_bytes_leaves_nothing_in_the_answer() -> None:
    tokenizer = Tokenizer(byte_fallback())
    for text in ("中文", "👩👩👩", "中" * 20, "a" + "é" * 9 + "\n"):
        prompt = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = tokenizer.open_detokenizer(skip_special_tokens=True, before=prompt)
        answer = tokenizer.encode("文 a", add_special_tokens=False)[1:]
        assert "".join(map(detokenizer.push, answer)) + detokenizer.finish() == "文 a"


@pytest.mark.parametrize("kind", [byte_level, lambda: Tokenizer(byte_fallback())])
def test_an_answer_completes_the_character_that_its_prompt_began(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    tokens = tokenizer.encode("a👩", add_special_tokens=False)
    after = tokenizer.encode("ab", add_special_tokens=False)[-1:]
    for cut in (1, 2):
        detokenizer = tokenizer.open_detokenizer(skip_special_tokens=True, before=tokens[:-cut])
        assert "".join(map(detokenizer.push, tokens[-cut:])) + detokenizer.finish() == "👩"
        # Unfinished, it is a part of the prompt's text and not of the answer's.
        detokenizer = tokenizer.open_detokenizer(skip_special_tokens=True, before=tokens[:-cut])
        assert detokenizer.finish() == ""
        detokenizer = tokenizer.open_detokenizer(skip_special_tokens=True, before=tokens[:-cut])
        assert "\ufffd" not in "".join(map(detokenizer.push, after)) + detokenizer.finish()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 263), max_size=40), st.lists(st.integers(0, 263), max_size=40))
def test_any_tokens_behind_any_prompt_have_a_text(prompt: list[int], tokens: list[int]) -> None:
    detokenizer = Tokenizer(byte_fallback()).open_detokenizer(skip_special_tokens=True, before=prompt)
    for token in tokens:
        detokenizer.push(token)
    detokenizer.finish()


def test_tokens_that_are_parts_of_words_and_characters_have_their_bytes() -> None:
    tokenizer = Tokenizer(byte_fallback())
    tokens = tokenizer.encode("a 中 ab", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == " a 中 ab".encode()
    assert tokenizer.token_text(tokens[-1]) == " ab"
