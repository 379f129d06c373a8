# SPDX-License-Identifier: Apache-2.0
"""An API is its row in the table: one that no other file knows is described, read, answered and refused as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from blink.api.endpoint import Endpoint, Writing
from blink.api.endpoints import ENDPOINTS
from blink.api.serving.body import Body
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.api.serving.reply import Reply
from blink.api.serving.session import Session
from blink.config import FrontendConfig
from blink.errors import BlinkError
from blink.link.client import RegionInfo
from blink.sampling_params import SamplingParams
from blink.text.assets import ModelAssets, load_assets
from blink.text.generation import Generation
from blink.text.prompt import PromptRules, read_tokens
from fake_engine import FakeServer
from small_tokenizer import MODEL

CONFIG = FrontendConfig(model=MODEL, region="test-endpoints", api_key=("secret",), max_body_bytes=1000)
KEY = {"Authorization": "Bearer secret"}
PATH = "/v1/limericks"
OPENAI_PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]


class LimerickBody(Body):
    """POST /v1/limericks."""

    about: str
    streamed: bool = False


@dataclass(slots=True, kw_only=True)
class Limerick(Reply):
    """The form of a limerick."""

    title: str


def read_limerick(body: LimerickBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    del bounds
    rules = PromptRules(add_special_tokens=False, param="about")
    return ParsedRequest(
        model=body.model,
        prompts=[read_tokens(body.about, rules, assets.tokenizer, engine)],
        rules=rules,
        params=SamplingParams(max_tokens=len(body.about)),
        reply=Limerick(title=body.about.upper()),
        stream=body.streamed,
    )


class LimerickWriter:
    """Writes a limerick's title, and whatever there is of it."""

    def __init__(self, reply: Limerick, session: Session) -> None:
        self._reply = reply
        self._generation = session.generations[0]

    def take(self, generation: Generation) -> None:
        del generation

    def encode(self, generation: Generation | None = None) -> bytes:
        return f"{self._reply.id}|{self._reply.title}|{(generation or self._generation).take().text}".encode()

    def encode_end(self, error: BlinkError | None) -> bytes:
        return b"" if error is not None else b"|end"


def write_refusal(message: str, kind: str, code: int, param: str | None) -> bytes:
    return f"alas ({code}, {kind}, {param}): {message}".encode()


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(CONFIG)


@pytest.fixture
def server(assets: ModelAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    endpoint = Endpoint(
        kind="limericks",
        path=PATH,
        name="rhyme",
        summary="Rhyme.",
        body=LimerickBody,
        main_field="about",
        read=read_limerick,
        writing=Writing(id_prefix="lim-", stream=LimerickWriter, non_streaming=LimerickWriter),
        error_body=write_refusal,
    )
    monkeypatch.setitem(ENDPOINTS, endpoint.kind, endpoint)
    server = FakeServer(CONFIG, assets, tmp_path)
    yield server
    server.close()


def test_a_new_endpoint_answers_whole_and_as_a_stream(server: FakeServer) -> None:
    whole = server.post(PATH, {"about": "a fish", "model": "m"}, headers=KEY)
    name, title, text = whole.text.split("|")
    assert whole.status_code == 200 and name.startswith("lim-") and title == "A FISH" and text
    assert server.engine.submitted[0].params.max_tokens == len("a fish")
    stream = server.post(PATH, {"about": "a fish", "streamed": True}, headers={**KEY, "X-Request-Id": "mine"})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert server.writer.written.decode() == f"lim-mine|A FISH|{text}|end"


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({}, "alas (400, BadRequestError, about): about: Field required"),
        ({"about": 3}, "alas (400, BadRequestError, about): about: Input should be a valid string"),
        ({"about": "a", "model": "other"}, "alas (404, NotFoundError, model): The model `other` does not exist."),
        ({"about": ""}, "alas (400, BadRequestError, about): "),
        ({"about": "a" * 2000}, "alas (413, Request Entity Too Large, None): "),
    ],
)
def test_its_refusals_are_in_its_own_form(server: FakeServer, body: Any, refusal: str) -> None:
    content = json.dumps(body).encode()

    async def pieces() -> Any:  # of a length that nobody knows beforehand
        yield content

    response = server.send("POST", PATH, content=pieces(), headers={**KEY, "Content-Type": "application/json"})
    assert response.text.startswith(refusal) and str(response.status_code) in refusal


def test_its_faults_and_absences_are_too(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimerickWriter, "encode", lambda *_: 1 // 0)
    assert server.post(PATH, {"about": "a"}, headers=KEY).text.startswith("alas (500, InternalServerError, None): ")
    server.engine.ready, server.engine.unavailable_reason = False, "the engine is on holiday"
    away = server.post(PATH, {"about": "a"}, headers=KEY)
    assert away.text == "alas (503, ServiceUnavailableError, None): Not available: the engine is on holiday."
    assert away.headers["retry-after"] == "1"


def test_it_is_described_and_needs_a_key(server: FakeServer) -> None:
    operation = server.send("GET", "/openapi.json").json()["paths"][PATH]["post"]
    assert operation["description"] == "Rhyme."
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/LimerickBody")
    assert server.post(PATH, {"about": "a"}).status_code == 401
    assert server.send("GET", PATH, headers=KEY).status_code == 405


@pytest.mark.parametrize("path", OPENAI_PATHS)
def test_the_log_shows_short_fields_and_no_texts(
    assets: ModelAssets, tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = FakeServer(
        FrontendConfig(model=MODEL, region="test-endpoints", enable_log_requests=True), assets, tmp_path
    )
    talk: dict[str, Any] = {"prompt": "secret", "input": "secret", "messages": [{"role": "user", "content": "secret"}]}
    body = {**talk, "temperature": 0.5, "service_tier": "x" * 10_000, "user": "secret"}
    if path == "/v1/responses":
        del body["prompt"]  # which there asks for a stored one
    assert server.post(path, body).status_code == 200
    server.close()
    (line,) = [record.getMessage() for record in caplog.records if " prompt tokens, {" in record.getMessage()]
    assert "'temperature': 0.5" in line and "secret" not in line and len(line) < 1000
