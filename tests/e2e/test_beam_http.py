# SPDX-License-Identifier: Apache-2.0
"""Beam search over HTTP with the default model, against a search by a client that asks for one token at a time."""

from __future__ import annotations

from typing import Any

import pytest

from processes import Frontend

pytestmark = pytest.mark.e2e

WIDTH, LENGTH = 3, 5
Beam = tuple[tuple[int, ...], float]


def likely_behind(server: Frontend, tokens: list[int]) -> dict[int, float]:
    options: Any = {"max_tokens": 1, "logprobs": 2 * WIDTH, "ignore_eos": True, "return_tokens_as_token_ids": True}
    [choice] = server.complete(tokens, **options)["choices"]
    top = choice["logprobs"]["top_logprobs"][0]
    return {int(name.removeprefix("token_id:")): logprob for name, logprob in top.items()}


def search(server: Frontend, prompt: list[int]) -> list[Beam]:
    """Return the likeliest sequences of LENGTH tokens, by their logprobs."""
    beams: list[Beam] = [((), 0.0)]
    for _ in range(LENGTH):
        grown = [
            ((*tokens, token), total + logprob)
            for tokens, total in beams
            for token, logprob in likely_behind(server, [*prompt, *tokens]).items()
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:WIDTH]
    return beams


def test_a_search_finds_what_a_client_finds_token_by_token(server: Frontend) -> None:
    prompt = server.post("/tokenize", prompt="The capital of France is").json()["tokens"]
    options: Any = {"n": WIDTH, "max_tokens": LENGTH, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    found = server.complete(prompt, use_beam_search=True, length_penalty=0.0, **options)["choices"]
    expected = search(server, prompt)
    assert [tuple(choice["token_ids"]) for choice in found] == [tokens for tokens, _ in expected]
    totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in found]
    assert totals == pytest.approx([total for _, total in expected], abs=0.02)
    [greedy] = server.complete(prompt, **options | {"n": 1})["choices"]
    assert totals[0] >= sum(greedy["logprobs"]["token_logprobs"]) - 0.02
    server.wait_until_idle()


def test_a_chat_is_searched_by_openais_client(server: Frontend) -> None:
    answer = server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Say yes."}],
        n=2,
        max_tokens=6,
        extra_body={"use_beam_search": True, "length_penalty": 1.2, "early_stopping": True},
    )
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 2 and all(texts)
    assert answer.usage is not None and 0 < answer.usage.completion_tokens <= 12
