# SPDX-License-Identifier: Apache-2.0
"""Haystack on Blink: a chat, a stream, a completion in a pipeline and an agent with a tool.

blink serve Qwen/Qwen3-0.6B       # in another terminal; any model that was trained to call tools
pip install haystack-ai
python examples/clients/haystack_client.py
"""

import os
from typing import Any

import httpx
from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

V1 = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = httpx.get(f"{V1}/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"][0]["id"]


def generator(**options: Any) -> OpenAIChatGenerator:
    secret = Secret.from_token(KEY)
    return OpenAIChatGenerator(
        api_key=secret, api_base_url=V1, model=MODEL, generation_kwargs={"max_tokens": 200}, **options
    )


def forecast(city: str) -> str:
    """Tell the weather in a city."""
    return f"{city}: sunny, 27 degrees"


pipeline = Pipeline()
pipeline.add_component(
    "prompt", ChatPromptBuilder([ChatMessage.from_user("What is the capital of {{country}}?")], required_variables="*")
)
pipeline.add_component("model", generator())
pipeline.connect("prompt.prompt", "model.messages")
reply = pipeline.run({"prompt": {"country": "France"}})["model"]["replies"][0]
print(reply.text, reply.meta["finish_reason"])

parts: list[str] = []
question = [ChatMessage.from_user("What is the capital of France?")]
generator(streaming_callback=lambda chunk: parts.append(chunk.content)).run(question)
print("streamed:", "".join(parts))

agent = Agent(chat_generator=generator(), tools=[create_tool_from_function(forecast)])
print("agent:", agent.run([ChatMessage.from_user("How is the weather in Rome?")])["messages"][-1].text)
