# SPDX-License-Identifier: Apache-2.0
"""A batch job and an interactive user on one server: best-effort requests give way to latency-sensitive ones.

blink serve                       # in another terminal
pip install openai
python examples/two_classes.py
"""

import asyncio
import os
import time

from openai import AsyncOpenAI

client = AsyncOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
BATCH_SIZE = 16


async def ask(model: str, question: str, tier: str, max_tokens: int) -> tuple[float, float]:
    """Return the seconds until the first token and until the last one."""
    begun = time.monotonic()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        stream=True,
        extra_body={"service_tier": tier},  # "flex": best-effort
    )
    first = 0.0
    async for _ in stream:
        first = first or time.monotonic() - begun
    return first, time.monotonic() - begun


async def main() -> None:
    """Start the batch, then ask as a user would."""
    model = (await client.models.list()).data[0].id
    batch = [
        asyncio.create_task(ask(model, f"Write a story about the number {i}.", "flex", 128)) for i in range(BATCH_SIZE)
    ]
    for _ in range(3):
        await asyncio.sleep(0.2)
        first, last = await ask(model, "What is the capital of France?", "default", 16)
        print(f"interactive: first token after {first:.3f} s, last after {last:.3f} s")
    times = [last for _, last in await asyncio.gather(*batch)]
    print(f"batch: {len(times)} answers, the last after {max(times):.3f} s")


asyncio.run(main())
