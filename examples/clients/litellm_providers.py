# SPDX-License-Identifier: Apache-2.0
"""LiteLLM on Blink, by six of its providers: chats, streams, a tool and errors.

blink serve                       # in another terminal
pip install litellm
python examples/clients/litellm_providers.py
"""

import json
import os
from typing import Any

import httpx
import litellm
import openai

litellm.suppress_debug_info = True
V1 = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
ROOT = V1.removesuffix("/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = httpx.get(f"{V1}/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"][0]["id"]
PROVIDERS = {"openai": V1, "hosted_vllm": V1, "anthropic": ROOT, "ollama_chat": ROOT, "ollama": ROOT}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "forecast", "description": "Tell the weather.", "parameters": CITY}}]


def ask(provider: str, question: str | list[Any], **options: Any) -> Any:
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    names = {"model": f"{provider}/{MODEL}", "api_base": PROVIDERS[provider], "api_key": KEY, "max_tokens": 200}
    return litellm.completion(messages=messages, **{**names, **options})


for provider in PROVIDERS:
    answer = ask(provider, "What is the capital of France?")
    print(f"{provider}: {answer.choices[0].message.content} [{answer.choices[0].finish_reason}]")
    chunks = list(ask(provider, "What is the capital of France?", stream=True))
    print(f"{provider} streamed: {litellm.stream_chunk_builder(chunks).choices[0].message.content}")
for provider in ("openai", "hosted_vllm", "anthropic", "ollama_chat"):
    talk: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
    for streams in (False, True):
        answer = ask(provider, talk, tools=TOOLS, stream=streams)
        message = (litellm.stream_chunk_builder(list(answer)) if streams else answer).choices[0].message
        function = message.tool_calls[0].function
        print(f"{provider} calls {function.name}({json.loads(function.arguments)})")
    talk += [message.model_dump(exclude_none=True)]
    talk += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 27 degrees"}]
    print(f"{provider}: {ask(provider, talk, tools=TOOLS).choices[0].message.content}")

for provider in ("openai", "hosted_vllm", "anthropic"):
    for options in ({"max_tokens": 10**6}, {"model": f"{provider}/other"}, {"temperature": -1}):
        try:
            ask(provider, "Hi", num_retries=0, **options)
        except openai.APIStatusError as error:  # LiteLLM's are of these kinds
            print(f"{provider}: {type(error).__name__} {error.status_code}")

text: Any = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", api_base=V1, api_key=KEY, prompt="one two " * 64, max_tokens=7
)
print(f"text-completion-openai: {text.choices[0].text}")
