# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenization against decoding the whole."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from blink.config import FrontendConfig
from blink.models.weights.files import default_model_path
from blink.text.assets import load_assets
from blink.text.detokenizer import StreamDetokenizer
from blink.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(not default_model_path().is_file(), reason="the default model is not downloaded")
EMOJI = "👩‍👩‍👧‍👦 中文 é"


@cache
def byte_level() -> Tokenizer:
    return load_assets(FrontendConfig()).tokenizer


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
@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
def test_byte_level_pieces_add_up_to_the_whole(tokens: list[int], skip: bool) -> None:
    detokenizer = byte_level().open_detokenizer(skip_special_tokens=skip)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.finish()
    assert text == byte_level().decode(tokens, skip_special_tokens=skip)


# The model's vocabulary has no token for the bytes of some control characters and of the highest planes.
@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs"]), max_size=40))
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
