# SPDX-License-Identifier: Apache-2.0
"""How `blink bench` reads answers: every way to cut a stream into reads gives the same counts."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink.bench.connection import Connection, Exchange
from blink.bench.events import EventReader
from blink.bench.record import PlannedRequest


def _chunk(text: str) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps({"id": "x", "choices": [choice], "usage": None}).encode() + b"\n\n"


_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":17}}\n\n'
_DONE = b"data: [DONE]\n\n"
# Text that looks like the markers that the reader goes by.
_TEXTS = st.lists(
    st.text(max_size=12) | st.sampled_from(['"usage"', '"choices":[]', "[DONE]", "\n\ndata: [DONE]\n\n", '"error"']),
    min_size=1,
    max_size=8,
)


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(borders)]


@given(_TEXTS, st.lists(st.integers(0, 10**6), max_size=30), st.booleans())
def test_any_cut_gives_the_same_events(texts: list[str], places: list[int], with_returns: bool) -> None:
    stream = b": keep-alive\n\n".join(_chunk(text) for text in texts) + _USAGE + _DONE
    if with_returns:
        stream = stream.replace(b"\n", b"\r\n")
    reader = EventReader()
    assert sum(reader.feed(piece) for piece in _cut(stream, places)) == len(texts)
    assert reader.is_done
    assert (reader.completion_tokens(), reader.prompt_tokens(), reader.error()) == (17, 5, "")


def test_stream_that_stops_early_is_not_done() -> None:
    reader = EventReader()
    assert reader.feed(_chunk("a") + _DONE[:-1]) == 1
    assert not reader.is_done
    assert reader.completion_tokens() is None


@pytest.mark.parametrize("body", ['{"error":{"message":"gone","code":503}}', '{"error": "gone"}'])
def test_error_in_the_stream_is_no_output(body: str) -> None:
    reader = EventReader()
    assert reader.feed(f"data: {body}\n\n".encode() + _DONE) == 0
    assert reader.error() == "gone"


class FakeTransport(asyncio.Transport):
    """Remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class Answered:
    """A connection with one request under way, and what became of it."""

    def __init__(self) -> None:
        self.ended: list[Exchange] = []
        self.free: list[Connection] = []
        self.transport = FakeTransport()
        self.connection = Connection(self.free.append)
        self.connection.connection_made(self.transport)
        self.exchange = Exchange(PlannedRequest(0, 0.0, b"request", 5, 17), 0.0, self.ended.append)
        self.connection.begin(self.exchange)
        assert self.transport.written == b"request"


def _respond(body: bytes, cuts: list[int], status: str = "200 OK") -> bytes:
    """Build a response in chunked transfer coding, the chunks cut anywhere."""
    chunks = [chunk for chunk in _cut(body, cuts) if chunk]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + coded


_PLACES = st.lists(st.integers(0, 10**6), max_size=20)


@given(_TEXTS, _PLACES, _PLACES)
def test_transfer_coding_and_reads_do_not_change_the_count(
    texts: list[str], chunks: list[int], reads: list[int]
) -> None:
    answered = Answered()
    for piece in _cut(_respond(b"".join(map(_chunk, texts)) + _USAGE + _DONE, chunks), reads):
        answered.connection.data_received(piece)
    [exchange] = answered.ended
    assert (exchange.record.outcome, exchange.record.error) == ("ok", "")
    assert len(exchange.record.times) == len(texts)
    assert list(exchange.record.times) == sorted(exchange.record.times)
    assert exchange.record.output_tokens == 17
    assert answered.free == [answered.connection]


@pytest.mark.parametrize(
    ("status", "outcome"),
    [("503 Service Unavailable", "rejected"), ("429 Too Many Requests", "rejected"), ("400 Bad Request", "failed")],
)
def test_refusals_are_told_from_failures_with_their_message(status: str, outcome: str) -> None:
    answered = Answered()
    answered.connection.data_received(_respond(b'{"error":{"message":"too much","code":1}}', [9], status))
    record = answered.ended[0].record
    assert (record.outcome, record.error) == (outcome, f"HTTP {status[:3]}: too much")


def test_connection_that_breaks_ends_its_request_once() -> None:
    answered = Answered()
    answered.connection.data_received(_respond(_chunk("a"), [])[: -len(b"0\r\n\r\n")])
    answered.connection.connection_lost(ConnectionResetError("reset"))
    [exchange] = answered.ended
    assert (exchange.record.outcome, exchange.record.error) == ("failed", "connection lost: reset")
    assert len(exchange.record.times) == 1
    assert answered.free == []


def test_answer_that_ends_with_its_connection_is_whole() -> None:
    answered = Answered()
    answered.connection.data_received(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + _chunk("a") + _USAGE + _DONE)
    answered.connection.connection_lost(None)
    assert answered.ended[0].record.outcome == "ok"


@pytest.mark.parametrize("body", [_chunk("a"), _DONE, b'{"choices":[{"text":"a"}]}'])
def test_answer_without_its_end_or_output_has_failed(body: bytes) -> None:
    answered = Answered()
    answered.connection.data_received(_respond(body, []))
    assert answered.ended[0].record.outcome == "failed"


def test_what_is_not_http_has_failed() -> None:
    answered = Answered()
    answered.connection.data_received(b"SSH-2.0-OpenSSH\r\n")
    assert answered.ended[0].record.error.startswith("not HTTP")
    assert cast("FakeTransport", answered.transport).closed
