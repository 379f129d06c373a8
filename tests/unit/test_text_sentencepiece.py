# SPDX-License-Identifier: Apache-2.0
"""GGUF tokenizers of the kind "llama", against the sentencepiece library whose model they were made of."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from blink.errors import ConfigError
from blink.text.gguf_tokenizer import build_tokenizer
from blink.text.tokenizer import Tokenizer

PROSE = (Path(__file__).parents[2] / "README.md").read_text()
TEXTS = (
    "The keeper of the lighthouse counted the ships.",
    "x",
    "",
    " two leading  and   inner spaces ",
    "line one\nline two\n\n\ttab",
    "naïve café, 漢字 and 🙂 are bytes",
    "lighthouselighthouse 12345 3.14159",
)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def library(request: pytest.FixtureRequest) -> tuple[sentencepiece.SentencePieceProcessor, bool]:
    """A model trained here, with and without a space before each text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        add_dummy_prefix=request.param,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<tool>"],
        control_symbols=["<turn>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), request.param


def describe(library: sentencepiece.SentencePieceProcessor, has_prefix: bool) -> dict[str, Any]:
    """Return the metadata that a converter writes of a model."""
    ids = range(library.get_piece_size())

    def kind(token: int) -> int:
        if library.is_unknown(token):
            return 2
        if library.is_control(token):
            return 3
        if library.id_to_piece(token) == "<tool>":
            return 4
        return 6 if library.is_byte(token) else 1

    values: dict[str, Any] = {
        "model": "llama",
        "tokens": [library.id_to_piece(token) for token in ids],
        "scores": [library.get_score(token) for token in ids],
        "token_type": [kind(token) for token in ids],
        "unknown_token_id": library.unk_id(),
        "bos_token_id": library.bos_id(),
        "add_space_prefix": has_prefix,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def test_tokens_and_texts_equal_those_of_the_library(
    library: tuple[sentencepiece.SentencePieceProcessor, bool],
) -> None:
    processor, has_prefix = library
    tokenizer = Tokenizer(build_tokenizer(describe(processor, has_prefix)))
    for text in (*TEXTS, PROSE[:3000]):
        tokens = tokenizer.encode(text, add_special_tokens=True)
        assert tokens == [processor.bos_id(), *processor.encode(text)], text
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_streamed_text_is_whole(library: tuple[sentencepiece.SentencePieceProcessor, bool]) -> None:
    tokenizer = Tokenizer(build_tokenizer(describe(*library)))
    for text in TEXTS:
        stream = tokenizer.open_detokenizer(skip_special_tokens=True)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(stream.push(token) for token in tokens) + stream.finish() == text


def test_special_tokens_in_a_text_are_found(library: tuple[sentencepiece.SentencePieceProcessor, bool]) -> None:
    processor, has_prefix = library
    tokenizer = Tokenizer(build_tokenizer(describe(processor, has_prefix)))
    tokens = tokenizer.encode("<turn><tool>", add_special_tokens=False)
    assert tokens == [processor.piece_to_id("<turn>"), processor.piece_to_id("<tool>")]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("scores", [0.0], "one score"), ("unknown_token_id", None, "unknown"), ("unknown_token_id", 10**6, "whole")],
)
def test_malformed_parts_are_refused(
    library: tuple[sentencepiece.SentencePieceProcessor, bool], name: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer({**describe(*library), f"tokenizer.ggml.{name}": value})
