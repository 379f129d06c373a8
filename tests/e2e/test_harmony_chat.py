# SPDX-License-Identifier: Apache-2.0
"""A tiny gpt-oss with random weights, served: its replies have the format's structure wherever a form asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harmony_model import write_harmony_model
from processes import Frontend, run_engine, start_frontend, stop

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How warm is it in Rome?"}]
UNITS = ["celsius", "fahrenheit"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": UNITS}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "temperature", "description": "Measure.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: Any = [{"type": "function", **FUNCTION, "strict": True}]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_harmony_model(tmp_path_factory.mktemp("harmony"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Frontend]:
    with run_engine(str(folder), "--load-format=dummy", "--served-model-name=harmony") as engine:
        frontend = start_frontend(engine.region, str(folder))
        yield frontend
        stop(frontend.process)


@pytest.fixture(scope="module")
def ids(server: Frontend) -> dict[str, str]:
    """The special tokens' ids, as biases name them."""
    names = ["<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|return|>", "<|call|>", "<|constrain|>"]
    tokens = {name: server.post("/tokenize", prompt=name, add_special_tokens=False).json()["tokens"] for name in names}
    assert all(len(found) == 1 for found in tokens.values())
    return {name: str(found[0]) for name, found in tokens.items()}


def avoid(server: Frontend, text: str) -> dict[str, int]:
    """Return biases against a text's bytes, and against white space, of which JSON may have much."""
    tokens = server.post("/tokenize", prompt=text + " \n\t\r", add_special_tokens=False).json()["tokens"]
    return {str(token): -30 for token in tokens}


def ask(server: Frontend, ids: dict[str, str], **fields: Any) -> Any:
    """Messages are likely to end as soon as they may, and analysis to be no channel."""
    bias = {ids["<|end|>"]: 60, ids["<|return|>"]: 100, **avoid(server, "a")}
    options: dict[str, Any] = {"max_tokens": 200, "logit_bias": bias, "temperature": 0, **fields}
    return server.client.chat.completions.create(model=server.model, messages=MESSAGES, **options)


def accumulate(chunks: Any) -> tuple[dict[str, str], list[dict[str, str]], str | None]:
    """The texts and calls of a stream, put together as clients do, and why it ended."""
    texts, calls, reason = {"content": "", "reasoning": ""}, list[dict[str, str]](), None
    for chunk in chunks:
        choice = chunk.choices[0]
        reason = choice.finish_reason or reason
        for name in texts:
            texts[name] += getattr(choice.delta, name, None) or ""
        for delta in choice.delta.tool_calls or ():
            if delta.id is not None:
                calls.append({"name": delta.function.name, "arguments": ""})
            calls[delta.index]["arguments"] += delta.function.arguments
    return texts, calls, reason


def test_an_answer_in_a_form_is_the_final_message(server: Frontend, ids: dict[str, str]) -> None:
    choice = ask(server, ids, response_format=FORM).choices[0]
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content)["unit"] in UNITS
    texts, calls, reason = accumulate(ask(server, ids, response_format=FORM, stream=True))
    assert (texts["content"], calls, reason) == (choice.message.content, [], "stop")
    assert texts["reasoning"] == (choice.message.reasoning or "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "temperature"}}])
def test_a_forced_call_is_made_behind_the_reasoning(server: Frontend, ids: dict[str, str], choice: Any) -> None:
    whole = ask(server, ids, tools=TOOLS, tool_choice=choice).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "temperature" and json.loads(call.function.arguments)["unit"] in UNITS
    assert whole.message.content is None
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    _, calls, reason = accumulate(ask(server, ids, tools=TOOLS, tool_choice=choice, stream=True))
    assert calls == [{"name": "temperature", "arguments": call.function.arguments}]
    assert reason == whole.finish_reason


def test_reasoning_is_told_apart(server: Frontend, ids: dict[str, str]) -> None:
    sampled = [
        ask(server, ids, temperature=1, seed=seed, response_format=FORM, logit_bias={ids["<|end|>"]: 4}, max_tokens=400)
        for seed in range(8)
    ]
    messages = [each.choices[0].message for each in sampled if each.choices[0].finish_reason == "stop"]
    assert any(message.reasoning for message in messages)
    assert all(json.loads(message.content)["unit"] in UNITS for message in messages)


def test_a_free_reply_ends_at_its_tokens_and_shows_none_of_them(server: Frontend, ids: dict[str, str]) -> None:
    for token in ("<|return|>", "<|call|>"):
        choice = ask(server, ids, logit_bias={ids[token]: 100}).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", "")
    noise = ask(server, ids, logit_bias={}, temperature=1, seed=1, max_tokens=300).choices[0].message
    assert "<|" not in (noise.content or "") + (noise.reasoning or "")


def test_a_response_has_a_call_behind_reasoning(server: Frontend, ids: dict[str, str]) -> None:
    response = server.client.responses.create(
        model=server.model,
        input="How warm is it?",
        instructions="Be brief.",
        reasoning={"effort": "low"},
        tools=RESPONSE_TOOLS,
        tool_choice="required",
        max_output_tokens=200,
        extra_body={"logit_bias": {ids["<|end|>"]: 60, ids["<|return|>"]: 100, **avoid(server, "")}},
        temperature=0,
    )
    assert response.status == "completed"
    assert response.output[-1].type == "function_call"
    assert all(item.type == "reasoning" for item in response.output[:-1])
    follow_up: Any = [
        {"role": "user", "content": "How warm is it?"},
        *[item.model_dump(exclude_none=True) for item in response.output],
        {"type": "function_call_output", "call_id": response.output[-1].call_id, "output": "21"},
    ]
    assert server.client.responses.create(model=server.model, input=follow_up, max_output_tokens=5).id


def test_an_unknown_effort_is_refused(server: Frontend) -> None:
    refused = server.post("/v1/chat/completions", messages=MESSAGES, reasoning_effort="minimal")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_effort")
