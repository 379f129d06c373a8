# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions with OpenAI's own client against real processes."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from blink.text.tokenizer import Tokenizer
from processes import MAX_MODEL_LEN, MAX_SEQUENCES, Frontend

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = "The capital of France is"


@pytest.fixture
def server(tiny_server: Frontend) -> Frontend:
    return tiny_server


def text_of(response: Any, index: int = 0) -> str:
    return response["choices"][index]["text"]


def test_stream_and_whole_are_equal(server: Frontend) -> None:
    num_tokens = 200  # so many that a busy machine streams them in several pieces too
    whole = server.client.completions.create(model=server.model, prompt=PROMPT, temperature=0, max_tokens=num_tokens)
    chunks = list(
        server.client.completions.create(
            model=server.model,
            prompt=PROMPT,
            temperature=0,
            max_tokens=num_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert len(chunks) > 4
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == num_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].id.startswith("cmpl-")


def test_usage_counts_equal_the_tokenizers(server: Frontend, tokenizer: Tokenizer) -> None:
    response = server.complete(PROMPT, return_token_ids=True)
    tokens = tokenizer.encode(PROMPT, add_special_tokens=True)
    choice, usage = response["choices"][0], response["usage"]
    assert choice["prompt_token_ids"] == tokens
    assert usage["prompt_tokens"] == len(tokens)
    assert usage["completion_tokens"] == len(choice["token_ids"]) == 8
    assert usage["total_tokens"] == len(tokens) + 8
    assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]


def test_token_ids_and_text_give_the_same(server: Frontend, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(PROMPT, add_special_tokens=True)
    assert text_of(server.complete(tokens)) == text_of(server.complete(PROMPT))


def test_a_list_of_prompts_equals_single_runs(server: Frontend, tokenizer: Tokenizer) -> None:
    prompts = [PROMPT, "Water boils at", "Once upon a time"]
    response = server.complete(prompts)
    singles = [text_of(server.complete(prompt)) for prompt in prompts]
    assert [text_of(response, index) for index in range(3)] == singles
    ids = server.complete([tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts])
    assert [text_of(ids, index) for index in range(3)] == singles


def test_n_sequences_use_seed_plus_i(server: Frontend) -> None:
    response = server.complete(PROMPT, n=3, seed=7, temperature=1.0)
    singles = [text_of(server.complete(PROMPT, seed=7 + i, temperature=1.0)) for i in range(3)]
    assert [text_of(response, index) for index in range(3)] == singles
    assert len(set(singles)) > 1
    assert response["usage"]["completion_tokens"] == 24


def test_without_a_seed_samples_differ(server: Frontend) -> None:
    texts = {text_of(server.complete(PROMPT, temperature=1.5, max_tokens=16)) for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_cut_exactly(server: Frontend, stream: bool) -> None:
    full = text_of(server.complete(PROMPT, max_tokens=24))
    stop = full[9:12]  # over a token border
    create: Any = server.client.completions.create
    extra = {"model": server.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "stop": ["zzz", stop]}
    result = create(**extra, stream=stream)
    choices = [chunk.choices[0] for chunk in result] if stream else [result.choices[0]]
    assert "".join(choice.text for choice in choices) == full[: full.index(stop)]
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == stop
    included = create(**extra, extra_body={"include_stop_str_in_output": True})
    assert included.choices[0].text == full[: full.index(stop) + 3]


def test_a_stop_token_ends_with_its_id(server: Frontend) -> None:
    full = server.complete(PROMPT, return_token_ids=True)["choices"][0]
    stop = full["token_ids"][4]
    first = full["token_ids"].index(stop)
    choice = server.complete(PROMPT, stop_token_ids=[stop], return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == full["token_ids"][: first + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert full["text"].startswith(choice["text"])


def test_logit_bias_forces_and_bans_a_token(server: Frontend, tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode(" fish", add_special_tokens=False)
    assert text_of(server.complete(PROMPT, logit_bias={str(token): 100}, max_tokens=3)) == " fish" * 3
    usual = server.complete(PROMPT, max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"][0]
    other = server.complete(PROMPT, max_tokens=1, return_token_ids=True, logit_bias={str(usual): -100})
    assert other["choices"][0]["token_ids"][0] != usual


def test_logprobs_are_consistent(server: Frontend) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 3}
    whole = server.client.completions.create(model=server.model, **body).choices[0]  # type: ignore[arg-type]
    data: Any = whole.logprobs
    assert "".join(data.tokens) == whole.text
    assert data.text_offset == [len("".join(data.tokens[:place])) for place in range(6)]
    for token, logprob, top in zip(data.tokens, data.token_logprobs, data.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[token] == max(top.values()) == logprob  # greedy takes the likeliest
        assert logprob <= 0
    stream: Any = server.client.completions.create(model=server.model, stream=True, **body)  # type: ignore[arg-type]
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [offset for part in parts for offset in part.text_offset] == data.text_offset
    assert [logprob for part in parts for logprob in part.token_logprobs] == pytest.approx(
        data.token_logprobs, abs=1e-4
    )


@pytest.mark.parametrize("stream", [True, False])
def test_echo_puts_the_prompt_first(server: Frontend, stream: bool) -> None:
    create: Any = server.client.completions.create
    result = create(model=server.model, prompt=PROMPT, temperature=0, max_tokens=8, echo=True, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in result) if stream else result.choices[0].text
    assert text == PROMPT + text_of(server.complete(PROMPT))


def test_ignore_eos_and_min_tokens_run_on(server: Frontend) -> None:
    eos = {"2": 100}
    ended = server.complete(PROMPT, logit_bias=eos)
    assert (text_of(ended), ended["usage"]["completion_tokens"]) == ("", 1)
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["stop_reason"] is None
    assert server.complete(PROMPT, logit_bias=eos, ignore_eos=True)["usage"]["completion_tokens"] == 8
    assert server.complete(PROMPT, logit_bias=eos, min_tokens=5)["usage"]["completion_tokens"] == 6
    shown = server.complete(PROMPT, logit_bias=eos, ignore_eos=True, skip_special_tokens=False)
    assert text_of(shown) == "<|im_end|>" * 8


def test_truncation_keeps_the_end_or_the_start(server: Frontend, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three four five six", add_special_tokens=True)
    for side, kept in (("left", tokens[-3:]), ("right", tokens[:3]), (None, tokens[-3:])):
        response = server.complete(tokens, truncate_prompt_tokens=3, truncation_side=side, return_token_ids=True)
        assert response["choices"][0]["prompt_token_ids"] == kept
    long = server.complete([5] * 5000, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 8


def test_a_prefix_is_cached_unless_the_salt_differs(server: Frontend) -> None:
    prompt = [100 + (place * 37) % 1000 for place in range(200)]

    def cached(**body: Any) -> int:
        return server.complete(prompt, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0
    assert cached() >= 176
    assert cached(cache_salt="tenant") == 0
    assert cached(cache_salt="tenant") >= 176


@pytest.mark.parametrize("stream", [True, False])
def test_parts_of_characters_become_text_as_the_tokenizer_decodes_them(
    server: Frontend, tokenizer: Tokenizer, stream: bool
) -> None:
    part = tokenizer.encode("中", add_special_tokens=False)[0]
    create: Any = server.client.completions.create
    bias = {str(part): 100}
    result = create(model=server.model, prompt="中文 é", echo=True, max_tokens=3, logit_bias=bias, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in result) if stream else result.choices[0].text
    assert text == "中文 é" + tokenizer.decode([part] * 3, skip_special_tokens=True)


def test_continuous_usage_counts_up(server: Frontend) -> None:
    stream = server.client.completions.create(
        model=server.model,
        prompt=PROMPT,
        temperature=0,
        max_tokens=100,  # however busy the machine is, they do not all come at once
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 100
    assert len(counts) >= 3


def test_penalties_and_truncations_change_the_text(default_server: Frontend) -> None:
    prompt = "a a a a a a a a"
    usual = text_of(default_server.complete(prompt, max_tokens=8))
    for change in ({"repetition_penalty": 2.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert text_of(default_server.complete(prompt, max_tokens=8, **change)) != usual
    for change in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):  # each leaves the likeliest token alone
        assert text_of(default_server.complete(prompt, max_tokens=8, temperature=1.0, **change)) == usual


def test_an_unknown_model_is_404(server: Frontend) -> None:
    with pytest.raises(NotFoundError) as caught:
        server.client.completions.create(model="gpt-9", prompt=PROMPT)
    assert caught.value.body == {
        "message": "The model `gpt-9` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt", "This model's maximum context length is 1024 tokens"),
        ({"prompt": "x " * 400_000}, "prompt", "This model's maximum context length is 1024 tokens"),
        ({"prompt": [5] * 1000, "max_tokens": 25}, "max_tokens", "25 > 1024 - 1000"),
        ({"prompt": ""}, "prompt", "cannot be empty"),
        ({"prompt": []}, "prompt", ""),
        ({"prompt": [49152]}, "prompt", "49152 is out of vocabulary"),
        ({"prompt": [-1]}, "prompt", "-1 is out of vocabulary"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "x", "temperature": 3e38}, "temperature", ""),
        ({"prompt": "x", "priority": 5}, "priority", "priority"),
        ({"prompt": "x", "n": 1000}, "n", ""),
        ({"prompt": ["x"] * (MAX_SEQUENCES // 2 + 1), "n": 2}, "n", f"at most {MAX_SEQUENCES}"),
        ({"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "stream", "not available when"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
        ({"prompt": "x", "truncate_prompt_tokens": 5000}, "truncate_prompt_tokens", "max_model_len"),
    ],
)
def test_impossible_requests_are_400_by_name(server: Frontend, body: Any, param: str, text: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        server.client.completions.create(model=server.model, extra_body=body, prompt="")
    error: Any = caught.value.body
    assert (error["param"], error["code"], error["type"]) == (param, 400, "BadRequestError")
    assert text in error["message"]
