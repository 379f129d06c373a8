# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Agents SDK on Blink, by chats and by responses: a tool, a stream, an output type and a handoff.

blink serve Qwen/Qwen3-0.6B       # in another terminal; any model that was trained to call tools
pip install openai-agents
python examples/clients/openai_agents_client.py
"""

import asyncio
import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

V1 = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = AsyncOpenAI(base_url=V1, api_key=os.environ.get("OPENAI_API_KEY", "none"))
set_tracing_disabled(True)  # traces go to OpenAI otherwise


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@function_tool
def forecast(city: str) -> str:
    """Tell the weather in a city."""
    return f"{city}: sunny, 27 degrees"


async def main() -> None:
    """Run the agents."""
    name = (await client.models.list()).data[0].id
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=name, openai_client=client)
        reporter = Agent(name="Reporter", model=model, tools=[forecast])
        print((await Runner.run(reporter, "How is the weather in Rome?")).final_output)
        stream = Runner.run_streamed(reporter, "How is the weather in Rome?")
        events = [event.type async for event in stream.stream_events()]
        print("streamed:", stream.final_output, len(events) > 20)
        reader = Agent(name="Reader", model=model, output_type=Person)
        print(repr((await Runner.run(reader, "Describe Anna.")).final_output))
        desk = Agent(name="Desk", model=model, handoffs=[reporter])
        moved = await Runner.run(desk, "Ask the reporter about the weather in Rome.")
        print(moved.last_agent.name, "|", moved.final_output)


asyncio.run(main())
