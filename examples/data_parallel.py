# SPDX-License-Identifier: Apache-2.0
"""Conversations on a server with several engines: each stays where its beginning is cached.

blink serve --data-parallel-size 2       # in another terminal
pip install openai
python examples/data_parallel.py
"""

import asyncio
import os
import re
from collections import Counter

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

client = AsyncOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
RULES = "You are guide number {number} of a museum. Be brief, and name one exhibit in each answer. " * 4
QUESTIONS = ("What do you show?", "And then?", "What is the last room?")


async def talk(model: str, number: int) -> list[int]:
    """Hold one conversation; return how many prompt tokens of each turn came from a prefix cache."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": RULES.format(number=number)}]
    cached: list[int] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=16)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        details = answer.usage.prompt_tokens_details if answer.usage else None
        cached.append((details and details.cached_tokens) or 0)
    return cached


async def tokens_of_engines() -> Counter[str]:
    """Read from /metrics what each engine has generated."""
    page = await client.with_options(base_url=str(client.base_url).replace("/v1", "")).get("/metrics", cast_to=str)
    found = re.findall(r'^vllm:generation_tokens_total{.*?engine="(\d+)".*?} (\S+)$', page, re.MULTILINE)
    return Counter({engine: int(float(count)) for engine, count in found})


async def main() -> None:
    """Hold eight conversations at once."""
    model, before = (await client.models.list()).data[0].id, await tokens_of_engines()
    for number, cached in enumerate(await asyncio.gather(*(talk(model, number) for number in range(8)))):
        print(f"conversation {number}: cached prompt tokens by turn {cached}")
    for engine, count in sorted((await tokens_of_engines() - before).items()):
        print(f"engine {engine}: {count} tokens")


asyncio.run(main())
