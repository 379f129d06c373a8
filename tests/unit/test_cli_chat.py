# SPDX-License-Identifier: Apache-2.0
"""How `blink chat` reads an event stream, as any OpenAI-compatible server may send it."""

from __future__ import annotations

import json

import pytest

from blink.cli.chat import Piece, read_pieces
from blink.errors import BlinkError, EngineUnavailableError


def _chunk(**delta: str) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]})


def test_pieces_are_the_texts_and_the_number_of_tokens() -> None:
    usage = "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 2}})
    lines = [
        ": keep-alive",
        "",
        _chunk(role="assistant"),
        _chunk(content="a"),
        _chunk(content="\n é"),
        usage,
        "data: [DONE]",
    ]
    pieces = list(read_pieces(iter(lines)))
    assert "".join(piece.text for piece in pieces) == "a\n é"
    assert pieces[-1] == Piece(num_tokens=2)


def test_error_in_the_stream_is_raised_with_its_message() -> None:
    error = "data: " + json.dumps({"error": {"message": "the engine failed", "code": 503}})
    with pytest.raises(BlinkError, match="the engine failed"):
        list(read_pieces(iter([_chunk(content="a"), error, "data: [DONE]"])))


def test_stream_that_just_ends_is_an_error() -> None:
    with pytest.raises(EngineUnavailableError):
        list(read_pieces(iter([_chunk(content="a")])))
