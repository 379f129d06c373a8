# SPDX-License-Identifier: Apache-2.0
"""echo with logprobs, and prompt_logprobs, in the forms that vLLM gives them."""

from __future__ import annotations

from typing import Any

from blink.text.tokenizer import Tokenizer
from processes import Frontend

TEXT = "The keeper of the lighthouse counted seven ships."


def test_an_echo_with_logprobs_has_those_of_prompt_and_output(tiny_server: Frontend, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT, add_special_tokens=True)
    body = {"max_tokens": 3, "echo": True, "logprobs": 2, "n": 2, "ignore_eos": True, "return_token_ids": True}
    found = tiny_server.complete([tokens, tokens[:4]], **body)
    assert len(found["choices"]) == 4
    for choice in found["choices"]:
        prompt = tokens if choice["index"] < 2 else tokens[:4]
        logprobs = choice["logprobs"]
        names = [tokenizer.token_text(token) for token in prompt + choice["token_ids"]]
        assert logprobs["tokens"] == names
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
        assert logprobs["text_offset"] == [len("".join(names[:i])) for i in range(len(names))]
        lists = (names, logprobs["token_logprobs"], logprobs["top_logprobs"])
        for name, value, top in zip(*(entries[1:] for entries in lists), strict=True):
            assert top[name] == value <= max(top.values())
            assert len(top) in (2, 3)
    [first, again, *_] = found["choices"]
    assert first["logprobs"]["token_logprobs"][: len(tokens)] == again["logprobs"]["token_logprobs"][: len(tokens)]
    assert found["usage"]["completion_tokens"] == 12


def test_prompt_logprobs_of_a_prompt_are_what_generation_gave_its_tokens(tiny_server: Frontend) -> None:
    """What was generated greedily, sent back as a prompt, has the same logprobs."""
    body = {"max_tokens": 12, "logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    [choice] = tiny_server.complete([7, 8, 9], **body)["choices"]
    prompt = [7, 8, 9, *choice["token_ids"]]
    [scored] = tiny_server.complete(prompt, max_tokens=1, prompt_logprobs=1)["choices"]
    assert scored["logprobs"] is None
    entries = scored["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(prompt)
    for entry, token, logprob in zip(
        entries[3:], choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True
    ):
        assert abs(entry[str(token)]["logprob"] - logprob) < 1e-3
        assert entry[str(token)]["rank"] == 1


def test_a_chat_tells_the_logprobs_of_its_prompt(server: Frontend, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "return_token_ids": True}
    found = server.post("/v1/chat/completions", **body, prompt_logprobs=0).json()
    ids = found["prompt_token_ids"]
    assert found["prompt_logprobs"][0] is None
    assert [list(entry) for entry in found["prompt_logprobs"][1:]] == [[str(token)] for token in ids[1:]]
    names = [
        entry[str(token)]["decoded_token"] for entry, token in zip(found["prompt_logprobs"][1:], ids[1:], strict=True)
    ]
    assert names == [tokenizer.token_text(token) for token in ids[1:]]


def test_embeddings_are_refused_by_name(tiny_server: Frontend) -> None:
    answer = tiny_server.post("/v1/embeddings", input="x", model="tiny")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert "embeddings" in error["message"] and error["code"] == 404


def test_an_echo_of_no_new_tokens_is_the_scored_prompt(tiny_server: Frontend, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT, add_special_tokens=True)
    body = {"max_tokens": 0, "echo": True, "return_token_ids": True}
    found = tiny_server.complete([tokens, tokens[:4]], **body, logprobs=1, n=2)
    scored = tiny_server.complete(tokens, max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert found["usage"]["completion_tokens"] == 0
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"]
    for choice in found["choices"]:
        prompt = tokens if choice["index"] < 2 else tokens[:4]
        assert choice["text"] == tokenizer.decode(prompt, skip_special_tokens=False)
        assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("length", None, [])
        assert choice["logprobs"]["tokens"] == [tokenizer.token_text(token) for token in prompt]
        assert choice["logprobs"]["token_logprobs"][0] is None
        for value, token, entry in zip(choice["logprobs"]["token_logprobs"][1:], prompt[1:], scored[1:], strict=False):
            assert abs(value - entry[str(token)]["logprob"]) < 1e-3
    [plain] = tiny_server.complete(TEXT, **body)["choices"]
    assert (plain["text"], plain["logprobs"], plain["finish_reason"]) == (TEXT, None, "length")


def test_an_echo_of_no_new_tokens_streams(tiny_server: Frontend) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(
        tiny_server.client.completions.create(
            model=tiny_server.model, prompt=TEXT, max_tokens=0, echo=True, logprobs=None, **options
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage.completion_tokens == 0
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
