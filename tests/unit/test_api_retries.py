# SPDX-License-Identifier: Apache-2.0
"""OpenAI's and Anthropic's own clients, in front of an engine that refuses at first: they come again as they are told.

tests/e2e/test_client_retries.py does it with real servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from blink.config import FrontendConfig
from blink.errors import BlinkError, ClientLimitError, EngineUnavailableError, OverloadedError
from blink.text.assets import ModelAssets, load_assets
from fake_engine import FakeEngine, FakeServer, FakeWriter
from small_tokenizer import MODEL

CONFIG = FrontendConfig(model=MODEL, region="test-retries")
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
ERRORS = [OverloadedError("Full."), EngineUnavailableError("Draining."), ClientLimitError("Too many.")]


class RefusingEngine(FakeEngine):
    """Refuses a number of submissions."""

    def __init__(self, error: BlinkError, times: int) -> None:
        super().__init__()
        self.error = error
        self.left = times

    def submit(self, prompt: Any, params: Any, **options: Any) -> int:
        self.left -= 1
        self.refusal = self.error if self.left >= 0 else None
        return super().submit(prompt, params, **options)


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(CONFIG)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The seconds that clients wait before they come again, which take no time here."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float, *_: object) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr("anyio.sleep", note)
    yield slept


def http_to(server: FakeServer, default_client: type[Any]) -> Any:
    """Return a client of the HTTP library that a package uses, whose requests go to the server's application."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {"blink.response_writer": FakeWriter()}
        await cast(ASGIApp, server.app)(scope, receive, send)

    library = import_module(default_client.__mro__[1].__module__.partition(".")[0])
    return library.AsyncClient(transport=library.ASGITransport(app))


async def ask_openai(server: FakeServer, max_retries: int) -> int:
    async with http_to(server, openai.DefaultAsyncHttpxClient) as http:
        options: Any = {"base_url": "http://localhost/v1", "api_key": "none", "http_client": http}
        client = openai.AsyncOpenAI(**options, max_retries=max_retries)
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=1)
        assert answer.usage is not None
        return answer.usage.completion_tokens


async def ask_anthropic(server: FakeServer, max_retries: int) -> int:
    anthropic = pytest.importorskip("anthropic", reason="the extra 'clients' is not installed")
    async with http_to(server, anthropic.DefaultAsyncHttpxClient) as http:
        options: Any = {"base_url": "http://localhost", "api_key": "none", "http_client": http}
        client = anthropic.AsyncAnthropic(**options, max_retries=max_retries)
        answer = await client.messages.create(model="m", messages=MESSAGES, max_tokens=1)
        return answer.usage.output_tokens


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_refused_client_comes_again_after_the_time_that_it_is_told(
    assets: ModelAssets, tmp_path: Path, waits: list[float], ask: Callable[..., Any], error: BlinkError
) -> None:
    engine = RefusingEngine(error, times=2)
    server = FakeServer(CONFIG, assets, tmp_path, engine)
    try:
        assert asyncio.run(ask(server, 2)) == 1
        assert waits == [1, 1]  # of Retry-After; their own would be others
        engine.left = 3
        with pytest.raises(Exception, match=error.message) as refused:
            asyncio.run(ask(server, 2))
        assert cast(Any, refused.value).status_code == error.status
    finally:
        server.close()
