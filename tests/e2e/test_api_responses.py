# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses against real processes, by OpenAI's own client."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from openai import BadRequestError, NotFoundError
from pydantic import BaseModel

from blink.models.weights.files import default_model_path
from processes import Engine, Frontend, start_frontend, stop, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
QUESTION = "Name a colour."


@pytest.fixture
def server(tiny_server: Frontend) -> Frontend:
    return tiny_server


def respond(server: Frontend, **fields: Any) -> Any:
    options: dict[str, Any] = {"input": QUESTION, "temperature": 0, "max_output_tokens": 12, **fields}
    return server.client.responses.create(model=server.model, **options)


def test_a_response_says_what_the_chat_says(server: Frontend) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = server.client.chat.completions.create(model=server.model, messages=messages, temperature=0, max_tokens=12)
    response = respond(server, instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text == chat.choices[0].message.content
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.metadata) == ("response", server.model, {"a": "b"})
    assert (response.instructions, response.max_output_tokens, response.store) == ("Be brief.", 12, True)
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    is_cut = chat.choices[0].finish_reason == "length"
    assert (response.status, response.incomplete_details is None) == (
        ("incomplete", False) if is_cut else ("completed", True)
    )


def test_the_stream_makes_the_same_response(server: Frontend) -> None:
    whole = respond(server)
    events = list(respond(server, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-4].text == events[-1].response.output_text == whole.output_text
    assert len(deltas) > 1
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_the_clients_stream_helper_accumulates_it(server: Frontend) -> None:
    # A limit that the end of the text comes before: the helper knows no incomplete response.
    bias = {"2": 100}
    options: Any = {"model": server.model, "input": QUESTION, "extra_body": {"logit_bias": bias, "min_tokens": 0}}
    with server.client.responses.stream(**options) as stream:
        assert stream.get_final_response().status == "completed"


class Colour(BaseModel):
    name: Literal["red", "blue"]
    warm: bool


def test_the_clients_parse_helper_gets_a_model(server: Frontend) -> None:
    options: Any = {"model": server.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 60}
    options["extra_body"] = {"logit_bias": {"2": 100}}
    parsed = server.client.responses.parse(text_format=Colour, **options)
    assert isinstance(parsed.output_parsed, Colour)
    with server.client.responses.stream(text_format=Colour, **options) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_conversation_of_items_is_the_chat_of_its_messages(server: Frontend) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "colour", "arguments": '{"n": 1}'},
        {"type": "function_call", "call_id": "b", "name": "colour", "arguments": '{"n": 2}'},
        {"type": "function_call_output", "call_id": "a", "output": "red"},
        {"type": "function_call_output", "call_id": "b", "output": "blue"},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": "colour", "arguments": f'{{"n": {n}}}'}}
        for name, n in (("a", 1), ("b", 2))
    ]
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "red"},
        {"role": "tool", "tool_call_id": "b", "content": "blue"},
    ]
    chat = server.client.chat.completions.create(model=server.model, messages=messages, temperature=0, max_tokens=12)
    response = respond(server, input=items)
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.output_text == chat.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "made_up"}}}, "text"),
        ({"reasoning": {"effort": 3}}, "reasoning"),
    ],
)
def test_what_is_not_done_is_a_400_by_the_name_of_this_api(server: Frontend, fields: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        respond(server, **fields)
    assert caught.value.param == param


def test_responses_are_stored_and_gone_on_from(server: Frontend) -> None:
    client = server.client.responses
    first = respond(server)
    assert client.retrieve(first.id).output_text == first.output_text
    second = respond(server, input="Why?", previous_response_id=first.id)
    talk: Any = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first.output_text}]
    assert respond(server, input=[*talk, {"role": "user", "content": "Why?"}]).output_text == second.output_text
    items = list(client.input_items.list(second.id, order="asc", limit=2))
    assert [item.id for item in items] == list(dict.fromkeys(item.id for item in items)) and len(items) == 3
    counted = client.input_tokens.count(model=server.model, input="Why?", previous_response_id=first.id)
    assert counted.input_tokens == second.usage.input_tokens
    client.delete(first.id)
    with pytest.raises(NotFoundError):
        client.retrieve(first.id)
    with pytest.raises(NotFoundError):
        respond(server, input="Why?", previous_response_id=first.id)


def test_another_worker_finds_a_stored_response(server: Frontend, tiny_engine: Engine) -> None:
    first = respond(server)
    other = start_frontend(tiny_engine.region, f"--tokenizer={default_model_path()}")
    try:
        assert respond(other, input="Why?", previous_response_id=first.id).previous_response_id == first.id
        other.client.responses.delete(first.id)
    finally:
        stop(other.process)
    with pytest.raises(NotFoundError):
        server.client.responses.retrieve(first.id)
    assert respond(server, input="Why?", previous_response_id=respond(server).id).status


def test_the_background_answers_later_or_is_cancelled(server: Frontend) -> None:
    client = server.client.responses
    begun = respond(server, background=True)
    assert begun.status == "queued"
    wait_for(lambda: client.retrieve(begun.id).status != "queued", 60)
    assert client.retrieve(begun.id).output_text == respond(server).output_text
    long = respond(server, background=True, max_output_tokens=900, extra_body={"ignore_eos": True})
    assert client.cancel(long.id).status == "cancelled"
    server.wait_until_idle()
    assert client.retrieve(long.id).status == "cancelled"


def test_logprobs_are_those_of_the_chat(server: Frontend) -> None:
    response = respond(server, include=["message.output_text.logprobs"], top_logprobs=2)
    part = response.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
