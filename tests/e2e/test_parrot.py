# SPDX-License-Identifier: Apache-2.0
"""A parrot says what its rules say, over each API, whole and streamed: test_clients.py rests on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from parrot_model import Rule, call
from parrot_server import serve_parrot
from processes import Frontend

pytestmark = pytest.mark.e2e
RULES = (
    Rule(("weather in Rome", "27 degrees"), "It is sunny in Rome."),
    Rule(("weather in Rome",), call("forecast", city="Rome")),
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"name": "forecast", "description": "Tell the weather.", "parameters": CITY}
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with serve_parrot(tmp_path_factory.mktemp("parrot"), RULES) as frontend:
        yield frontend


def ask(parrot: Frontend, messages: list[Any], **options: Any) -> Any:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    return parrot.client.chat.completions.create(model="parrot", messages=messages, tools=tools, **options)


def test_it_calls_a_tool_and_answers_with_its_result(parrot: Frontend) -> None:
    message = ask(parrot, ASKED).choices[0].message
    (made,) = message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("forecast", {"city": "Rome"})
    result = {"role": "tool", "tool_call_id": made.id, "content": "Sunny, 27 degrees"}
    answer = ask(parrot, [*ASKED, message, result]).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("It is sunny in Rome.", "stop")
    chunks = ask(parrot, [*ASKED, message, result], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is sunny in Rome."


def test_it_says_the_same_by_messages_and_responses(parrot: Frontend) -> None:
    tool = {"name": "forecast", "input_schema": CITY}
    message = parrot.post("/v1/messages", model="parrot", max_tokens=200, messages=ASKED, tools=[tool]).json()
    assert (message["stop_reason"], message["content"][0]["input"]) == ("tool_use", {"city": "Rome"})
    tools: Any = [{"type": "function", **FUNCTION}]
    response = parrot.client.responses.create(model="parrot", input=ASKED, tools=tools)
    assert [json.loads(item.arguments) for item in response.output if item.type == "function_call"] == [
        {"city": "Rome"}
    ]


def test_it_has_one_more_thing_to_say(parrot: Frontend) -> None:
    answer = ask(parrot, [{"role": "user", "content": "Who are you?"}])
    assert answer.choices[0].message.content == "I do not know."
