# SPDX-License-Identifier: Apache-2.0
"""The load of cpu_peers.py: streams in a closed loop and one long prompt, over the OpenAI API of any server.

Prompts are token IDs, drawn anew for each request: no server finds one in its cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Final

STREAMS: Final = (1, 4, 16)
REQUESTS: Final = 2  # of a stream, one after the other: prompts then come while other streams decode
_TOKENS: Final = range(1000, 20000)
_HEAD: Final = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class AnswerError(Exception):
    """A server has ended an answer early: llama.cpp's parser does so for some random texts."""


@dataclass(slots=True)
class Answer:
    """When the pieces of an answer came, in monotonic seconds."""

    pieces: list[float] = field(default_factory=list[float])
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What a run of streams gave."""

    tokens_per_second: float  # generated tokens by the time from the first request to the last token
    itl_p99_ms: float


async def ask(port: int, prompt_tokens: int, num_tokens: int) -> Answer:
    """Send one request, and read its stream."""
    asked = {
        "prompt": random.choices(_TOKENS, k=prompt_tokens),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = Answer()
    async for line in reader:
        if line.startswith(b"data: {"):
            now, event = time.perf_counter(), json.loads(line[6:])
            if "error" in event:
                raise AnswerError(str(event["error"]))
            if any(choice["text"] for choice in event["choices"]):
                answer.pieces.append(now)
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    if answer.num_tokens != num_tokens:
        raise AnswerError(f"an answer has {answer.num_tokens} tokens instead of {num_tokens}")
    return answer


async def run_streams(port: int, count: int, prompt_tokens: int, num_tokens: int) -> Run:
    """Run so many streams at once, each of which sends its requests one after the other."""

    async def run_stream() -> list[Answer]:
        return [await ask(port, prompt_tokens, num_tokens) for _ in range(REQUESTS)]

    start = time.perf_counter()
    answers = [answer for each in await asyncio.gather(*(run_stream() for _ in range(count))) for answer in each]
    seconds = time.perf_counter() - start
    gaps = sorted(b - a for answer in answers for a, b in zip(answer.pieces, answer.pieces[1:], strict=False))
    return Run(sum(answer.num_tokens for answer in answers) / seconds, gaps[int(0.99 * (len(gaps) - 1))] * 1e3)


async def measure_prefill(port: int, prompt_tokens: int) -> float:
    """Return the tokens per second of a prompt, by the time until its answer of one token has come."""
    start = time.perf_counter()
    await ask(port, prompt_tokens, 1)
    return prompt_tokens / (time.perf_counter() - start)
