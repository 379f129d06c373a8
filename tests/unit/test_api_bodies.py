# SPDX-License-Identifier: Apache-2.0
"""Odd bodies, at each endpoint that takes one: refused by place or served, and never a fault of the server's."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest

from blink.api.endpoints import ENDPOINTS
from blink.api.http.json_body import parse_body
from blink.api.reading import read_body
from blink.api.serving.parsed_request import Bounds
from blink.config import FrontendConfig
from blink.errors import BadRequestError
from blink.region.layout import Task
from blink.text.assets import ModelAssets, load_assets
from blink.text.json_weight import MAX_JSON_DEPTH, weigh_json
from fake_engine import ENGINE, FakeEngine, FakeServer
from pooling_engine import PoolingEngine
from rich_bodies import BODIES, places_in, with_value
from small_tokenizer import MODEL, with_names

CONFIG = FrontendConfig(model=MODEL, region="test-odd-bodies", max_client_share=1.0)
# Each endpoint with a body that it serves; the odd value takes the place of, or stands beside, what is there.
HI = [{"role": "user", "content": "Hi"}]
SOUND: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/chat/completions/batch": {"messages": [HI], "max_tokens": 1},
    "/v1/chat/completions/render": {"messages": HI, "max_tokens": 1},
    "/v1/completions/render": {"prompt": "Hi", "max_tokens": 1},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho"]},
    "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
    "/invocations": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 1, "model": "m"},
    "/v1/messages/count_tokens": {"messages": HI, "model": "m"},
    "/api/chat": {"messages": HI, "model": "m", "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "Hi", "model": "m", "stream": False, "options": {"num_predict": 1}},
    "/api/show": {"model": "m"},
    "/completion": {"prompt": "Hi", "n_predict": 1},
    "/infill": {"input_prefix": "Hi", "input_suffix": "Ho", "n_predict": 1},
    "/apply-template": {"messages": HI},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [28]},
}
FILL_IN = {"<fim_prefix>": 20, "<fim_suffix>": 21, "<fim_middle>": 22}
BY_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS.values()}
NESTED = "[" * 700 + "]" * 700
# What stands in a field, as JSON or as what only looks like it.
VALUES = {
    "null": "null",
    "true": "true",
    "a negative number": "-1",
    "a fraction": "1.5",
    "a tiny number": "1e-400",
    "the largest 64 bits": "18446744073709551615",
    "more than 64 bits": "-99999999999999999999999",
    "400 digits": "8" * 400,
    "4,400 digits": "8" * 4400,
    "beyond a double": "1e999",
    "NaN": "NaN",
    "minus infinity": "-Infinity",
    "an empty text": '""',
    "a number as text": '"' + "7" * 4400 + '"',
    "infinity as text": '"Infinity"',
    "half a pair": '"a\\udfffb"',
    "half a pair within": '{"a": ["\\ud900", 1]}',
    "half a pair as a name": '{"\\udc00": 1}',
    "control characters": '"\\u0000\\u001b[2J\\u2028"',
    "an empty list": "[]",
    "nulls": "[null, null]",
    "mixed": '[1, "a", {}, [2]]',
    "an empty object": "{}",
    "an object": '{"type": 5, "name": [], "role": {}}',
    "nested": NESTED,
    "nested beyond a parser": "[" * 1500 + "]" * 1500,
    "nested objects": '{"a":' * 300 + "1" + "}" * 300,
}
# Fields that every endpoint may meet, whether it knows them or not.
FIELDS = ("", "model", "stop", "metadata", "chat_template_kwargs")
WHOLE = {
    "nothing": b"",
    "a space": b" ",
    "a byte order mark alone": b"\xef\xbb\xbf",
    "UTF-16": '{"prompt": "Hi"}'.encode("utf-16"),
    "no UTF-8": b'{"prompt": "\xc3\x28", "input": "", "messages": []}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "a text": b'"prompt"',
    "a list": b'[{"prompt": "Hi"}]',
    "a number": b"5" * 4500,
    "an open object": b'{"prompt": "Hi"',
    "an open text": b'{"prompt": "Hi',
    "brackets": b"[" * 5000,
    "closing brackets": b"]" * 5000,
    "a comment": b'{"prompt": "Hi"} // max_tokens',
    "two bodies": b'{"prompt": "Hi"}{"prompt": "Ho"}',
    "a number as a name": b'{1: "Hi"}',
    "a trailing comma": b'{"prompt": "Hi",}',
    "single quotes": b"{'prompt': 'Hi'}",
    "a control character": b'{"prompt": "a\nb"}',
}


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    found = load_assets(CONFIG)
    return replace(found, tokenizer=with_names(found.tokenizer, FILL_IN))


@pytest.fixture(scope="module")
def servers(assets: ModelAssets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Task, FakeServer]]:
    engines = {Task.GENERATE: FakeEngine(), **{task: PoolingEngine(task) for task in (Task.EMBED, Task.SCORE)}}
    made = {task: FakeServer(CONFIG, assets, tmp_path_factory.mktemp("m"), engine) for task, engine in engines.items()}
    yield made
    for server in made.values():
        server.close()


@pytest.fixture
def server(servers: dict[Task, FakeServer], request: pytest.FixtureRequest) -> FakeServer:
    """A server of a model that is for what the endpoint of a test's `path` does."""
    path = request.node.callspec.params.get("path") if hasattr(request.node, "callspec") else None
    writing = BY_PATH[path].writing if path else None
    return servers[Task.GENERATE if writing is None else writing.task]


def main_field(path: str) -> str:
    return next(iter(SOUND[path]))


def odd_body(path: str, field: str, value: str) -> bytes:
    """A sound body with a value in its main field, or in another one."""
    fields = {name: json.dumps(each) for name, each in SOUND[path].items()} | {field or main_field(path): value}
    return ("{" + ", ".join(f'"{name}": {each}' for name, each in fields.items()) + "}").encode()


def models_of(kind: Any) -> list[Any]:
    """Return the models of a body, or of each kind of body where an endpoint takes several."""
    return [kind] if isinstance(kind, type) else [model for part in get_args(kind) for model in models_of(part)]


def shape_of(value: object) -> object:
    """Return the names of an object's members, and of theirs."""
    return {name: shape_of(each) for name, each in value.items()} if isinstance(value, dict) else None


def check(server: FakeServer, path: str, body: bytes, content_type: bytes = b"application/json") -> int:
    response = server.send("POST", path, content=body, headers=[(b"Content-Type", content_type)])
    assert response.status_code in (200, 400, 404), (path, body[:80], response.text)
    if response.status_code != 200:
        usual = json.loads(BY_PATH[path].error_body("", "", 400, None))
        assert shape_of(response.json()) == shape_of(usual)
        assert "Internal" not in response.text and "cannot be read" not in response.text, (body[:80], response.text)
    return response.status_code


def test_each_endpoint_with_a_body_is_tried() -> None:
    assert set(SOUND) == set(BY_PATH)


@pytest.mark.parametrize("path", SOUND)
def test_no_value_in_a_field_is_a_fault_of_the_server(
    server: FakeServer, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    for field in FIELDS:
        for value in VALUES.values():
            check(server, path, odd_body(path, field, value))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert check(server, path, json.dumps(SOUND[path]).encode()) == 200


@pytest.mark.long
@pytest.mark.parametrize("path", SOUND)
def test_no_value_in_any_field_that_is_known_is_a_fault_of_the_server(server: FakeServer, path: str) -> None:
    for field in {name: None for model in models_of(BY_PATH[path].body) for name in model.model_fields}:
        for value in VALUES.values():
            check(server, path, odd_body(path, field, value))


@pytest.mark.parametrize("count", [25, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("path", SOUND)
def test_no_value_in_any_place_of_a_rich_body_is_a_fault_of_the_server(
    server: FakeServer, path: str, count: int | None
) -> None:
    body = BODIES[path]
    assert check(server, path, json.dumps(body).encode()) == 200
    cases = [(place, value) for place in places_in(body) for value in VALUES.values()]
    random.Random(path).shuffle(cases)
    for place, value in cases[:count]:
        check(server, path, with_value(body, place, value))


@pytest.mark.parametrize("path", SOUND)
def test_no_body_is_a_fault_of_the_server(server: FakeServer, path: str) -> None:
    assert {check(server, path, body) for body in WHOLE.values()} == {400}
    sound = json.dumps(SOUND[path]).encode()
    for kind in (b"text/plain", b"multipart/form-data", b"application/", b"\xff"):
        assert check(server, path, sound, kind) == 400
    twice = sound[:-1] + b', "model": "other", "model": "m"}'  # the last one counts, as in Python
    marked = b"\xef\xbb\xbf" + sound  # as some editors write it
    assert [check(server, path, body) for body in (twice, marked, b"\n\t " + sound)] == [200] * 3


@pytest.mark.parametrize("path", SOUND)
@pytest.mark.parametrize(
    "name", ["4,400 digits", "400 digits", "NaN", "beyond a double", "half a pair within", "nested"]
)
def test_what_json_cannot_hold_or_is_too_deep_is_refused_by_its_field(server: FakeServer, path: str, name: str) -> None:
    for field in (main_field(path), "zzz"):
        response = server.send("POST", path, content=odd_body(path, field, VALUES[name]))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == field if "param" in error else field in str(error)


@pytest.mark.parametrize("deep", ["text", "object"])
@pytest.mark.parametrize("levels", [MAX_JSON_DEPTH + 1, 500, 990])
def test_arguments_of_an_earlier_call_are_measured_as_text_and_as_object(
    server: FakeServer, deep: str, levels: int
) -> None:
    nested = '{"a":' + "[" * levels + "]" * levels + "}"
    function = '{"name": "f", "arguments": ' + (json.dumps(nested) if deep == "text" else nested) + "}"
    call = '{"role": "assistant", "tool_calls": [{"function": ' + function + "}]}"
    item = function[:-1] + ', "type": "function_call", "call_id": "c"}'
    for path, field, value in (
        ("/v1/chat/completions", "messages", f"[{call}]"),
        ("/tokenize", "messages", f"[{call}]"),
        ("/v1/responses", "input", f"[{item}]"),
    ):
        response = server.send("POST", path, content=odd_body(path, field, value))
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_arguments_within_the_depth_and_broken_ones_are_served(server: FakeServer) -> None:
    for arguments in ("[" * 60 + "]" * 60, '"a"', "1"):
        for text in (f'{{"a": {arguments}}}', '{"a": ' + "[" * 900):  # what a model left unfinished is its text
            message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
            assert server.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("text", "depth", "name"),
    [
        ("1", 0, ""),
        ("[]", 1, ""),
        ('{"a": 1, "b": [[]], "c": []}', 3, "b"),
        ('{"a": "[[[[", "b": {"c": [1]}, "d": [[]]}', 3, "b"),
        ('{"a\\"[": [1]}', 2, 'a\\"['),
        ("]]]{}", 1, ""),
    ],
)
def test_depth_is_that_of_brackets_outside_of_texts(text: str, depth: int, name: str) -> None:
    weight = weigh_json(text.encode())
    assert (weight.depth, weight.name_in(text.encode()) or "") == (depth, name)


def test_a_field_may_be_as_deep_as_is_said_and_no_deeper() -> None:
    for levels, is_sound in ((MAX_JSON_DEPTH, True), (MAX_JSON_DEPTH + 1, False)):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            body = f'{{"x": 1, "y": {opening * levels}1{closing * levels}}}'.encode()
            if is_sound:
                assert parse_body(body, 0)["x"] == 1
                continue
            with pytest.raises(BadRequestError, match="y must be nested at most 64 deep") as caught:
                parse_body(body, 0)
            assert caught.value.param == "y"


def test_what_nobody_foresaw_is_refused_and_logged_once(
    assets: ModelAssets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(ENDPOINTS, "completions", replace(ENDPOINTS["completions"], read=fail))
    with pytest.raises(BadRequestError) as caught:
        read_body("completions", b'{"prompt": "a"}', assets, Bounds(1000, ("m",), ENGINE))
    assert (caught.value.param, caught.value.message) == ("prompt", "prompt cannot be read: ZeroDivisionError.")
    assert [record.getMessage() for record in caplog.records] == ["a body could not be read"]
