# SPDX-License-Identifier: Apache-2.0
"""An agent: the model calls functions of this program until it can answer.

blink serve Qwen/Qwen3-0.6B       # in another terminal; any model that was trained to call tools
pip install openai
python examples/tools_agent.py
"""

import json
import os
from typing import Any

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id


def temperature(city: str) -> str:
    """Stand for a real service."""
    return json.dumps({"city": city, "celsius": {"Paris": 18, "Rome": 27}[city]})


FUNCTIONS = {"temperature": temperature}
CITY = {"type": "string", "enum": ["Paris", "Rome"]}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
FUNCTION: Any = {"name": "temperature", "description": "Measure the temperature in a city.", "parameters": PARAMETERS}

messages: list[Any] = [{"role": "user", "content": "Is it warmer in Paris or in Rome?"}]
for turn in range(5):
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[{"type": "function", "function": FUNCTION}],
        # The first turn must call. Then the model decides. Arguments keep to the schema in both cases.
        tool_choice="auto" if turn else "required",
        temperature=0,
        max_tokens=256,
    )
    message = answer.choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        result = FUNCTIONS[call.function.name](**arguments)
        print(f"{call.function.name}({arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
