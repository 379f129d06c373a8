# SPDX-License-Identifier: Apache-2.0
"""Tool calls of the libraries that applications are written with, against the default model.

They are the extra "clients": instructor, langchain-openai and pydantic-ai.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from processes import Frontend

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]
QUESTION = "Anna is 31 years old and lives in Rome."


class Person(BaseModel):
    """A person."""

    name: Literal["Anna", "Ben"]
    age: int
    city: Literal["Paris", "Rome"]


def check(person: object) -> None:
    assert isinstance(person, Person)
    assert 0 <= abs(person.age) < 10**9


def test_instructor_extracts_a_model(server: Frontend) -> None:
    instructor = pytest.importorskip("instructor", reason="the extra 'clients' is not installed")
    client = instructor.from_openai(server.client, mode=instructor.Mode.TOOLS)
    options: Any = {"model": server.model, "temperature": 0, "max_tokens": 200, "max_retries": 0}
    messages = [{"role": "user", "content": QUESTION}]
    check(client.chat.completions.create(response_model=Person, messages=messages, **options))
    *_, last = client.chat.completions.create_partial(response_model=Person, messages=messages, **options)
    assert last.city in ("Paris", "Rome")


def test_langchain_calls_a_tool_and_goes_on(server: Frontend) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="the extra 'clients' is not installed")
    langchain_messages = pytest.importorskip("langchain_core.messages")

    def remember(name: Literal["Anna", "Ben"], age: int) -> str:
        """Remember how old a person is."""
        return f"{name} is {age}."

    model = langchain.ChatOpenAI(
        model=server.model, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=200
    )
    bound = model.bind_tools([remember], tool_choice="any", parallel_tool_calls=False)
    asked = [langchain_messages.HumanMessage(QUESTION)]
    message = bound.invoke(asked)
    (call,) = message.tool_calls
    assert call["name"] == "remember" and set(call["args"]) == {"name", "age"}
    whole: Any = None
    for chunk in bound.stream(asked):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == call["args"]
    result = langchain_messages.ToolMessage(remember(**call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([remember]).invoke([*asked, message, result]).id
    check(model.with_structured_output(Person, method="function_calling").invoke(QUESTION))
    check(model.with_structured_output(Person, method="json_schema").invoke(QUESTION))


@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_calls_its_tools(server: Frontend, api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="the extra 'clients' is not installed")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model = getattr(models, api)(server.model, provider=provider)
    settings: Any = {"temperature": 0, "max_tokens": 200}
    agent = pydantic_ai.Agent(model, output_type=Person, model_settings=settings)
    check(agent.run_sync(QUESTION).output)
