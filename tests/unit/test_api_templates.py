# SPDX-License-Identifier: Apache-2.0
"""Chat templates that requests bring along: refused unless the server trusts them, and rendered within the limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from blink.config import FrontendConfig
from blink.text.assets import load_assets
from fake_engine import FakeServer
from small_tokenizer import MODEL

CONFIG = FrontendConfig(model=MODEL, region="test-templates")
TEMPLATE = "{% for message in messages %}{{ message.content|upper }}{{ mark }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "one fish"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1, "chat_template": TEMPLATE}


def open_server(folder: Any, *, trusts: bool) -> FakeServer:
    config = replace(CONFIG, trust_request_chat_template=trusts)
    return FakeServer(config, load_assets(config), folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    server = open_server(tmp_path_factory.mktemp("templates"), trusts=True)
    yield server
    server.close()


def prompt_of(server: FakeServer) -> str:
    """Return the text that the engine was given last."""
    return text_of(server, [int(token) for token in server.engine.submitted[-1].prompt])


def text_of(server: FakeServer, tokens: list[int]) -> str:
    return server.service.assets.tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_trusted_template_makes_the_prompt(server: FakeServer) -> None:
    assert server.post("/v1/chat/completions", CHAT).status_code == 200
    assert prompt_of(server) == "ONE FISH"
    fields = {"chat_template_kwargs": {"mark": " END"}}
    assert server.post("/v1/chat/completions", CHAT | fields).status_code == 200
    assert prompt_of(server) == "ONE FISH END"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions/render"])
def test_other_endpoints_take_it_too(server: FakeServer, path: str) -> None:
    response = server.post(path, CHAT)
    assert response.status_code == 200
    tokens = response.json()["tokens" if path == "/tokenize" else "token_ids"]
    assert text_of(server, tokens) == "ONE FISH"
    text = server.post("/apply-template", CHAT)
    assert text.status_code == 200 and text.json() == {"prompt": "ONE FISH"}


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for %}", "malformed"),
        ("{{ raise_exception('no fish here') }}", "no fish here"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages"),
        ("{{ 'x' * 10**9 }}", "refused the messages"),
    ],
)
def test_what_a_template_does_wrong_is_the_clients_error(server: FakeServer, template: str, told: str) -> None:
    response = server.post("/v1/chat/completions", CHAT | {"chat_template": template})
    assert response.status_code == 400 and told in response.json()["error"]["message"]


def test_no_server_takes_one_unless_it_is_told_to(tmp_path: Any) -> None:
    server = open_server(tmp_path, trusts=False)
    try:
        for fields in ({}, {"chat_template": None, "chat_template_kwargs": {"chat_template": TEMPLATE}}):
            for path in ("/v1/chat/completions", "/tokenize", "/v1/chat/completions/render"):
                response = server.post(path, CHAT | fields)
                assert response.status_code == 400 and response.json()["error"]["param"] == "chat_template"
                assert "--trust-request-chat-template" in response.json()["error"]["message"]
        assert not server.engine.submitted
    finally:
        server.close()
