# SPDX-License-Identifier: Apache-2.0
"""A conversation whose answers are printed while they are generated.

blink serve                       # in another terminal
pip install openai
python examples/chat_stream.py
"""

import os
from typing import Any

from openai import OpenAI

# OPENAI_BASE_URL names another server. A server without --api-key takes any key.
client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id

messages: list[Any] = [{"role": "system", "content": "Answer in one sentence."}]
for question in ["What is the capital of France?", "What is it known for?"]:
    print(f"> {question}")
    messages.append({"role": "user", "content": question})
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},  # the last chunk then counts the tokens
    )
    answer = ""
    for chunk in stream:
        if chunk.choices:
            text = chunk.choices[0].delta.content or ""
            answer += text
            print(text, end="", flush=True)
        elif chunk.usage:
            print(f"\n[{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")
    # The next question builds on this answer. Its prompt begins with these messages, which the prefix cache holds.
    messages.append({"role": "assistant", "content": answer})
