# SPDX-License-Identifier: Apache-2.0
"""The whole API through ASGI, in front of an engine that notes what is submitted and answers each with one token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
from starlette.types import ASGIApp, Receive, Scope, Send

from blink.api.observe.http_metrics import RequestCounter
from blink.api.observe.metric_store import MetricStore
from blink.api.observe.metrics import NUM_VALUES, Metrics
from blink.api.routes import create_app
from blink.api.server import add_middleware
from blink.api.service import ApiService
from blink.api.serving.poller import Poller
from blink.api.serving.response_store import StoreLimits
from blink.config import FrontendConfig
from blink.errors import BlinkError
from blink.link.client import EngineClient, RegionInfo
from blink.link.group import EngineGroup
from blink.region.layout import COMPLETION, CqeKind, Drop, FinishReason, Opcode, PauseMode
from blink.text.assets import ModelAssets
from make_tokenizer import VOCAB_SIZE

ENGINE = RegionInfo(
    max_model_len=2048,
    vocab_size=VOCAB_SIZE,
    block_size=16,
    model="m",
    hash_key=bytes(32),
    max_sequences=64,
    prefix_caching=True,
    scheduling_policy="fcfs",
    num_queue_pairs=1,
    can_constrain=True,
)
_TOKEN = 28


class FakeEngine:
    """Stands for the client of an engine."""

    def __init__(self) -> None:
        self.ready = True
        self.info: RegionInfo | None = ENGINE
        self.unavailable_reason = self.fingerprint = ""
        self.refusal: BlinkError | None = None
        self.is_silent = False  # takes requests, and answers none
        self.submitted: list[SimpleNamespace] = []
        self.cancelled: list[int] = []
        self.wake: Callable[[], object] = lambda: None
        self._answered = self._num_pauses = 0
        self.is_paused, self.absent = False, 0
        self.paused: list[tuple[PauseMode, Drop]] = []  # how it was asked to

    def submit(self, prompt: Any, params: Any, **options: Any) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(SimpleNamespace(prompt=prompt, params=params, **options))
        if not self.is_silent:
            asyncio.get_running_loop().call_soon(self.wake)
        return len(self.submitted)

    def cancel(self, sequence: int) -> None:
        self.cancelled.append(sequence)

    def drain(self) -> Any:
        fresh = range(self._answered + 1, len(self.submitted) + 1)
        self._answered = len(self.submitted)
        entries = [entry for sequence in fresh for entry in self.answer(sequence)]
        rows = np.zeros(len(entries), COMPLETION)
        for row, entry in zip(rows, entries, strict=True):
            for name, value in entry.items():
                row[name] = value
        return rows

    def answer(self, sequence: int) -> Iterator[dict[str, Any]]:
        """Return the completions of a sequence: one token, and as many alternatives as are asked for."""
        yield {"kind": CqeKind.ADMITTED, "sequence": sequence}
        for place in range(self.submitted[sequence - 1].params.logprobs or 0):
            yield {"kind": CqeKind.TOP_LOGPROB, "sequence": sequence, "token": _TOKEN + place, "logprob": -place}
        yield {"kind": CqeKind.TOKEN, "sequence": sequence, "token": _TOKEN, "finish_reason": FinishReason.LENGTH}

    def stats(self) -> dict[str, int]:
        return {"num_pauses": self._num_pauses} if self._num_pauses else {}

    def order(self, opcode: Opcode, **fields: int) -> None:
        if opcode == Opcode.RESET_PREFIX_CACHE:
            raise BlinkError("a fake engine has no cache")
        self.is_paused = opcode == Opcode.PAUSE
        if self.is_paused:
            self.paused.append((PauseMode(fields["pause_mode"]), Drop(fields["pause_drop"])))
            self._num_pauses += 1


class FakeWriter:
    """Stands for the writer of a response: gathers what is written past ASGI."""

    def __init__(self) -> None:
        self.received = 0.0
        self.written = b""
        self.leave: Callable[[], None] | None = None  # what the client's leaving calls, once a response waits for it

    def take_body(self, most: int) -> None:
        del most

    def prepare_stream(self) -> None:
        pass

    def write(self, data: bytes) -> int:
        self.written += data
        return 0

    def abort(self) -> None:
        pass

    @contextmanager
    def on_disconnect(self, callback: Callable[[], None]) -> Iterator[None]:
        self.leave = callback
        yield


class FakeServer:
    """The application of a worker, and the engine that it talks to."""

    def __init__(
        self, config: FrontendConfig, assets: ModelAssets, folder: Path, engine: FakeEngine | None = None
    ) -> None:
        self.engine = engine or FakeEngine()
        client = cast(EngineClient, self.engine)
        self._store = MetricStore(config.region, NUM_VALUES, folder)
        metrics = Metrics(self._store, [client.stats])
        poller = Poller(EngineGroup([client]), metrics, 0, config.max_client_share)
        limits = StoreLimits(
            str(folder / "responses.sqlite"), config.response_store_size, config.response_store_bytes, 0.5
        )
        self.service = ApiService(config, assets, poller, store_limits=limits if limits.max_responses else None)
        self.engine.wake = self.service.poller.table.drain
        self.app = RequestCounter(add_middleware(create_app(self.service), config), metrics.count_http)
        self.writer = FakeWriter()

    def close(self) -> None:
        self.service.reader.close()
        self.service.compilation.close()
        self._store.close()

    def send(self, method: str, path: str, address: str = "127.0.0.1", **options: Any) -> httpx.Response:
        return asyncio.run(self.send_soon(method, path, address, **options))

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        return self.send("POST", path, json=body, **options)

    async def send_soon(self, method: str, path: str, address: str = "127.0.0.1", **options: Any) -> httpx.Response:
        """Send a request from an address; the text of a stream is in `self.writer`."""
        self.writer = writer = FakeWriter()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope["extensions"] = {"blink.response_writer": writer}
            await cast(ASGIApp, self.app)(scope, receive, send)

        transport = httpx.ASGITransport(app, client=(address, 1), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)
