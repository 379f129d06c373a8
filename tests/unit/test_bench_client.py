# SPDX-License-Identifier: Apache-2.0
"""The client of `blink bench` against a small server of the test: times, failures, connections, several processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from blink.bench.client import send_all
from blink.bench.measurement import measure
from blink.bench.record import ClientResult, Endpoint, PlannedRequest, Progress
from blink.bench.usage import Usage

_EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
_END = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
_PAUSES = {"good": 0.05, "slow": 1.0}  # seconds between the two events of an answer
_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Server:
    """Answers by the word that a request's body is, and counts connections."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        assert self._ready.wait(300)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        while not reader.at_eof():
            try:
                word = (await reader.readuntil(b"\r\n\r\n") and await reader.readexactly(4)).decode()
            except asyncio.IncompleteReadError:
                break
            if word in _PAUSES:
                writer.write(_HEAD + _chunk(_EVENT))
                await asyncio.sleep(_PAUSES[word])
                writer.write(_chunk(_EVENT + _END) + b"0\r\n\r\n")
            elif word == "full":
                writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 17\r\n\r\n" + b'{"message":"no!"}')
            elif word == "hang":
                writer.write(_HEAD)
            else:
                break
        writer.close()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


def _plan(*words: str, gap: float = 0.0) -> list[PlannedRequest]:
    return [
        PlannedRequest(index, index * gap, b"POST / HTTP/1.1\r\n\r\n" + word.encode(), 2, 3)
        for index, word in enumerate(words)
    ]


def _send(server: Server, requests: list[PlannedRequest], timeout: float = 60.0) -> ClientResult:
    async def run() -> ClientResult:
        start = asyncio.get_running_loop().time()
        endpoint = Endpoint(host="127.0.0.1", port=server.port, tls=False, timeout=timeout)
        return await send_all(endpoint, requests, start, lambda _: None)

    return asyncio.run(run())


def test_requests_go_at_their_times_and_events_are_stamped(server: Server) -> None:
    result = _send(server, _plan("slow", "slow", "slow", gap=0.02))
    for record in sorted(result.records, key=lambda record: record.index):
        assert record.outcome == "ok", record.error
        assert record.sent >= record.at
        assert len(record.times) == 2
        assert record.times[1] - record.times[0] > 0.1
        assert (record.input_tokens, record.output_tokens) == (2, 3)
        assert record.sent < record.times[0] < record.times[1] <= record.ended
    assert len(result.loop_lags) > 0


def test_an_idle_connection_is_used_again(server: Server) -> None:
    result = _send(server, _plan("good", "good", gap=2))
    assert [record.outcome for record in result.records] == ["ok"] * 2
    assert server.num_connections == 1


def test_open_loop_does_not_wait_for_answers(server: Server) -> None:
    result = _send(server, _plan(*["slow"] * 20))
    assert max(record.sent for record in result.records) < min(record.times[1] for record in result.records)
    assert server.num_connections == 20


def test_each_failure_has_its_outcome_and_reason(server: Server) -> None:
    records = {record.index: record for record in _send(server, _plan("full", "hang", "quit", "good"), 3).records}
    assert (records[0].outcome, records[0].error) == ("rejected", "HTTP 503: no!")
    assert (records[1].outcome, records[1].error) == ("failed", "no complete answer within 3 s")
    assert (records[2].outcome, records[2].error) == ("failed", "connection lost: closed by the server")
    assert records[3].outcome == "ok"


def test_server_that_is_not_there_is_a_failure() -> None:
    gone = Server()
    gone.stop()
    gone.port = 1
    [record] = _send(gone, _plan("good")).records
    assert record.outcome == "failed"
    assert record.error.startswith("cannot connect")


def test_processes_share_the_load_and_their_records_are_merged(server: Server) -> None:
    reports: list[Progress] = []
    endpoint = Endpoint(host="127.0.0.1", port=server.port, tls=False, timeout=300)
    requests = _plan(*["good"] * 5, "full", gap=0.25)
    measurement = measure(endpoint, requests, processes=2, on_progress=reports.append)
    assert [record.index for record in measurement.records] == list(range(6))
    assert [record.outcome for record in measurement.records] == ["ok"] * 5 + ["rejected"]
    assert reports
    assert reports[-1].num_sent <= 6
    assert measurement.usage == Usage()
