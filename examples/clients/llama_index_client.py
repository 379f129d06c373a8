# SPDX-License-Identifier: Apache-2.0
"""LlamaIndex on Blink: a chat, a stream, a completion, a Pydantic model and an agent with a tool.

blink serve Qwen/Qwen3-0.6B       # in another terminal; any model that was trained to call tools
pip install llama-index-llms-openai-like
python examples/clients/llama_index_client.py
"""

import asyncio
import os

import httpx
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

V1 = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = httpx.get(f"{V1}/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"][0]["id"]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def forecast(city: str) -> str:
    """Tell the weather in a city."""
    return f"{city}: sunny, 27 degrees"


model = OpenAILike(
    model=MODEL, api_base=V1, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_tokens=200
)
question = [ChatMessage(role="user", content="What is the capital of France?")]
print(model.chat(question).message.content)
print("streamed:", "".join(part.delta or "" for part in model.stream_chat(question)))
print("completed:", model.complete("What is the capital of France?").text)
print(repr(model.as_structured_llm(Person).chat([ChatMessage(role="user", content="Anna is 31 years old.")]).raw))


async def ask_agent() -> None:
    """Let an agent call the tool and answer."""
    agent = FunctionAgent(tools=[forecast], llm=model)
    print("agent:", await agent.run("How is the weather in Rome?"))


asyncio.run(ask_agent())
