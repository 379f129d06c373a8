# SPDX-License-Identifier: Apache-2.0
"""Agents of smolagents on Blink: one that calls a tool, and one that writes code.

blink serve Qwen/Qwen3-0.6B       # in another terminal; any model that was trained to call tools
pip install 'smolagents[openai]'
python examples/clients/smolagents_client.py
"""

import os

import openai
from smolagents import ChatMessage, CodeAgent, MessageRole, OpenAIServerModel, ToolCallingAgent, tool

V1 = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = openai.OpenAI(base_url=V1, api_key=KEY).models.list().data[0].id


@tool
def forecast(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: The city's name.
    """
    return f"{city}: sunny, 27 degrees"


model = OpenAIServerModel(model_id=MODEL, api_base=V1, api_key=KEY, max_tokens=400)
question = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "What is the capital of France?"}])]
print(model.generate(question).content)
print("streamed:", "".join(delta.content or "" for delta in model.generate_stream(question)))

agent = ToolCallingAgent(tools=[forecast], model=model, max_steps=4, verbosity_level=0)
print("tool:", agent.run("How is the weather in Oslo?"))
print("code:", CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0).run("What is 6 times 7?"))
streaming = CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0, stream_outputs=True)
print("\nstreamed code:", streaming.run("What is 6 times 7?"))
