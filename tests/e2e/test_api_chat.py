# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions, /tokenize and /detokenize against real processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError

from blink.text.tokenizer import Tokenizer
from processes import MAX_MODEL_LEN, Frontend

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
PROMPT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def server(tiny_server: Frontend) -> Frontend:
    return tiny_server


def chat(server: Frontend, **body: Any) -> Any:
    options: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **body}
    extra = {name: options.pop(name) for name in list(options) if name in EXTRA}
    return server.client.chat.completions.create(**options, extra_body=extra)


EXTRA = {"return_token_ids", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "min_tokens"}


def test_stream_and_whole_are_equal(server: Frontend) -> None:
    whole = chat(server)
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert whole.id.startswith("chatcmpl-")
    assert (whole.object, chunks[0].object) == ("chat.completion", "chat.completion.chunk")


def test_chat_equals_the_completion_of_the_rendered_prompt(server: Frontend) -> None:
    whole = chat(server, return_token_ids=True)
    completion: Any = server.complete(PROMPT, max_tokens=12, return_token_ids=True)["choices"]
    assert whole.prompt_token_ids == completion[0]["prompt_token_ids"]
    assert whole.choices[0].token_ids == completion[0]["token_ids"]
    assert whole.choices[0].message.content == completion[0]["text"]


def test_text_parts_equal_a_string(server: Frontend) -> None:
    parts = [MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}]
    assert chat(server, messages=parts).choices[0].message.content == chat(server).choices[0].message.content


def test_without_max_tokens_the_context_is_the_limit(server: Frontend, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("x " * 990, add_special_tokens=False)
    text = tokenizer.decode(tokens[:980], skip_special_tokens=False)
    response = chat(server, messages=[{"role": "user", "content": text}], max_tokens=None, logit_bias={"100": 100})
    assert response.usage.total_tokens == MAX_MODEL_LEN
    assert response.choices[0].finish_reason == "length"


def test_max_completion_tokens_wins(server: Frontend) -> None:
    assert chat(server, max_completion_tokens=3, max_tokens=9).usage.completion_tokens == 3


def test_logprobs_are_consistent(server: Frontend) -> None:
    choice = chat(server, logprobs=True, top_logprobs=2, max_tokens=5).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob >= entry.top_logprobs[1].logprob
    assert chat(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    chunks = list(chat(server, logprobs=True, top_logprobs=2, max_tokens=5, stream=True))
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_n_choices_stream_interleaved_but_whole(server: Frontend) -> None:
    whole = chat(server, n=3, seed=1, temperature=1.0)
    texts = ["", "", ""]
    for chunk in chat(server, n=3, seed=1, temperature=1.0, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_the_final_message_is_continued(server: Frontend) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The colour of the sky is"}]
    response = chat(server, messages=messages, add_generation_prompt=False, continue_final_message=True)
    expected: Any = server.complete(PROMPT + "The colour of the sky is", max_tokens=12)["choices"]
    assert response.choices[0].message.content == expected[0]["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"min_tokens": 5000, "max_tokens": None}, "min_tokens"),
    ],
)
def test_impossible_requests_are_400_by_name(server: Frontend, body: Any, param: str) -> None:
    response = server.http.post(
        "/v1/chat/completions",
        content=json.dumps({"messages": MESSAGES, **body}),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_clients_error_is_the_openai_type(server: Frontend) -> None:
    with pytest.raises(BadRequestError, match="top_logprobs"):
        chat(server, top_logprobs=3)


def test_tokenize_equals_what_a_request_uses(server: Frontend, tokenizer: Tokenizer) -> None:
    text = server.post("/tokenize", prompt="Hello 中文", return_token_strs=True).json()
    assert text["tokens"] == tokenizer.encode("Hello 中文", add_special_tokens=True)
    assert (text["count"], text["max_model_len"]) == (len(text["tokens"]), MAX_MODEL_LEN)
    assert text["token_strs"][0] == "Hello"
    messages = server.post("/tokenize", messages=MESSAGES).json()
    assert messages["tokens"] == chat(server, return_token_ids=True).prompt_token_ids
    assert messages["token_strs"] is None
    assert server.post("/tokenize", prompt="").json()["tokens"] == []
    assert server.post("/tokenize", prompt="x " * 3000).json()["count"] > MAX_MODEL_LEN


def test_detokenize_gives_the_text_back(server: Frontend) -> None:
    tokens = server.post("/tokenize", prompt="Hello <|im_end|> 中文").json()["tokens"]
    assert server.post("/detokenize", tokens=tokens).json() == {"prompt": "Hello <|im_end|> 中文"}
    wrong = server.post("/detokenize", tokens=[10**6])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


def test_models_list_and_card(server: Frontend) -> None:
    (model,) = server.client.models.list().data
    assert model.id == server.model == "tiny"
    assert model.max_model_len == MAX_MODEL_LEN  # type: ignore[attr-defined]
    assert server.client.models.retrieve(model.id) == model
    missing = server.http.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")
