# SPDX-License-Identifier: Apache-2.0
"""Anthropic's own client on Blink: a streamed message, and a tool.

blink serve                       # in another terminal
pip install anthropic
python examples/anthropic_client.py
"""

import os

from anthropic import Anthropic

# Anthropic's client adds /v1 itself.
url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1").removesuffix("/v1")
client = Anthropic(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id

question = {"role": "user", "content": "What is the capital of France?"}
with client.messages.stream(model=model, max_tokens=64, system="Be brief.", messages=[question]) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    print(f"\n[{stream.get_final_message().usage.output_tokens} tokens]")

forecast = {
    "name": "forecast",
    "description": "Tell the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
    },
}
answer = client.messages.create(
    model=model,
    max_tokens=400,
    messages=[{"role": "user", "content": "How will the weather be in Rome in 3 days?"}],
    tools=[forecast],
    tool_choice={"type": "any"},  # the model must call; the arguments keep to the schema
    extra_body={"temperature": 0},
)
for block in answer.content:
    if block.type == "tool_use":
        print(f"{block.name}({block.input})")
