# SPDX-License-Identifier: Apache-2.0
"""Anthropic's own client, unmodified, against the default model. It is one of the extra "clients"."""

from __future__ import annotations

from typing import Any

import pytest

from processes import Frontend

anthropic = pytest.importorskip("anthropic", reason="the extra 'clients' is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"name": "forecast", "description": "Tell the weather.", "input_schema": SCHEMA}]
GREEDY = {"temperature": 0}  # which newer clients have no argument for
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Rome in 3 days?"}]


@pytest.fixture
def client(server: Frontend) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_a_stream_is_the_whole_message(server: Frontend, client: Any) -> None:
    options: Any = {"model": server.model, "max_tokens": 24, "system": "Be brief.", "extra_body": GREEDY}
    whole = client.messages.create(messages=ASKED, **options)
    (block,) = whole.content
    assert (block.type, whole.role, whole.stop_reason in ("end_turn", "max_tokens")) == ("text", "assistant", True)
    assert block.text and whole.id.startswith("msg_") and whole.usage.output_tokens > 0
    with client.messages.stream(messages=ASKED, **options) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (block.text, whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=server.model, messages=ASKED, system="Be brief.")
    for usage in (whole.usage, final.usage):
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    word = block.text.split()[1]
    stopped = client.messages.create(messages=ASKED, stop_sequences=[word], **options)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool"}])
def test_a_tool_is_called_and_its_result_answered(server: Frontend, client: Any, choice: Any) -> None:
    if choice["type"] == "tool":
        choice = {**choice, "name": "forecast"}
    options: Any = {"model": server.model, "max_tokens": 100, "tools": TOOLS, "extra_body": GREEDY}
    asked = client.messages.create(messages=ASKED, tool_choice=choice, **options)
    call = asked.content[-1]
    assert (asked.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "forecast")
    assert call.input["city"] in ("Paris", "Rome") and 1 <= call.input["days"] <= 9
    with client.messages.stream(messages=ASKED, tool_choice=choice, **options) as stream:
        final = stream.get_final_message()
    assert (final.content[-1].input, final.stop_reason) == (call.input, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 25 degrees."}
    talk = [*ASKED, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=talk, tool_choice={"type": "none"}, **options)
    assert answer.content[0].type == "text" and answer.stop_reason in ("end_turn", "max_tokens")


def test_its_beta_and_its_errors(server: Frontend, client: Any) -> None:
    options: Any = {"model": server.model, "messages": ASKED, "max_tokens": 4}
    assert client.beta.messages.create(betas=["context-management-2025-06-27"], **options).content
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (anthropic.NotFoundError, {"model": "other"}),
        (anthropic.BadRequestError, {"max_tokens": 9000}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "x " * 5000}]}),
    ]
    for error, fields in wrong:
        for stream in (False, True):
            with pytest.raises(error) as caught:
                client.messages.create(**{**options, **fields, "stream": stream})
            assert getattr(caught.value, "body")["error"]["message"]  # noqa: B009
