# SPDX-License-Identifier: Apache-2.0
"""LangChain's integration of Anthropic on Blink: a chat, a stream, a tool and structured output.

blink serve Qwen/Qwen3-0.6B       # in another terminal; any model that was trained to call tools
pip install langchain-anthropic
python examples/clients/langchain_anthropic_client.py
"""

import os
from typing import Any

import httpx
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

V1 = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = httpx.get(f"{V1}/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"][0]["id"]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def forecast(city: str) -> str:
    """Tell the weather in a city."""
    return f"{city}: sunny, 27 degrees"


options: dict[str, Any] = {"model": MODEL, "base_url": V1.removesuffix("/v1"), "api_key": KEY, "max_tokens": 200}
model = ChatAnthropic(**options)
print(model.invoke("What is the capital of France?").text)
print("streamed:", "".join(chunk.text for chunk in model.stream("What is the capital of France?")))

talk: list[Any] = [HumanMessage("How is the weather in Rome?")]
bound = model.bind_tools([forecast])
whole: Any = None
for chunk in bound.stream(talk):
    whole = chunk if whole is None else whole + chunk
message: Any = bound.invoke(talk)
assert whole.tool_calls[0]["args"] == message.tool_calls[0]["args"]
call = message.tool_calls[0]
print(f"{call['name']}({call['args']})")
talk += [message, ToolMessage(forecast.invoke(call["args"]), tool_call_id=call["id"])]
print(bound.invoke(talk).text)

print(repr(model.with_structured_output(Person).invoke("Anna is 31 years old.")))
