# SPDX-License-Identifier: Apache-2.0
"""allowed_token_ids, bad_words and suffix: what the engine is asked for, and what is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automata import PlainAutomaton
from blink.config import FrontendConfig
from blink.errors import BadRequestError
from blink.grammar.compiler import compile_structured
from blink.request.planner import Plan, Planner
from blink.request.token_rules import apply_token_rules
from blink.sampling_params import MAX_LOGIT_BIASES, SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from blink.text.fill_in import fill_in
from blink.text.prompt import PromptRules
from fake_engine import ENGINE, FakeServer
from small_tokenizer import MODEL, load_small_assets

ASSETS = load_small_assets()
TOKENIZER = ASSETS.tokenizer
RULES = PromptRules(add_special_tokens=False)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


# Words by how many tokens they have, alone and behind a space.
WORDS = ["the", "fish", "a", "elephant", "Zanzibar", "blue", "I", "quizzical"]
SINGLE = next(word for word in WORDS if len(encode(word)) == 1)
SEVERAL = next(word for word in WORDS if len(encode(word)) > 1)


def plan(**params: Any) -> Plan:
    return Planner(ASSETS).plan_now(["One"], SamplingParams(**params), RULES, ENGINE)


def biases_of(**params: Any) -> dict[int, float]:
    """Return what is added to each token's logit in all."""
    found: Counter[int] = Counter()
    entries = plan(**params).sequences[0].params.biases
    assert len(entries) <= MAX_LOGIT_BIASES and all(-100 <= bias <= 100 for _, bias in entries)
    for token, bias in entries:
        found[token] += bias  # pyright: ignore[reportArgumentType]
    return dict(found)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0, 50.0])
def test_allowed_tokens_are_lifted_above_any_noise(temperature: float) -> None:
    found = biases_of(allowed_token_ids=[40, 7, 40, 300], temperature=temperature)
    assert found.keys() == {7, 40, 300}
    assert min(found.values()) >= 200 + 25.7 * temperature  # noise lies between -2.82 and 22.88
    assert biases_of(allowed_token_ids=[5], logit_bias={9: -1.5})[9] == -1.5


def test_where_few_tokens_are_not_allowed_these_are_sunk() -> None:
    others = {3, 77}
    allowed = sorted(set(range(ENGINE.vocab_size)) - others)
    found = biases_of(allowed_token_ids=allowed, repetition_penalty=0.5)
    assert found.keys() == others and max(found.values()) * 0.5 <= -226


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("allowed_token_ids", {"allowed_token_ids": [ENGINE.vocab_size]}),
        ("allowed_token_ids", {"allowed_token_ids": range(ENGINE.vocab_size // 2)}),
        ("allowed_token_ids", {"allowed_token_ids": [4], "repetition_penalty": 1.2}),
        ("allowed_token_ids", {"allowed_token_ids": [4], "frequency_penalty": 0.5}),
        ("allowed_token_ids", {"allowed_token_ids": [4], "structured_outputs": StructuredOutputsParams(regex="a")}),
        ("allowed_token_ids", {"allowed_token_ids": [4], "bad_words": [SEVERAL]}),
        ("bad_words", {"bad_words": [SEVERAL], "structured_outputs": StructuredOutputsParams(regex="a")}),
        ("bad_words", {"bad_words": [SEVERAL * 200]}),
        ("bad_words", {"bad_words": [SINGLE], "repetition_penalty": 1e-4}),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(param: str, params: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        plan(**params)
    assert caught.value.param == param


def test_a_bad_word_of_one_token_is_sunk_as_it_stands_and_behind_a_space() -> None:
    found = biases_of(bad_words=[f" {SINGLE}"], temperature=2.0)
    spaced = encode(f" {SINGLE}")
    assert found.keys() == {*encode(SINGLE), *(spaced if len(spaced) == 1 else [])}
    assert max(found.values()) <= -250
    assert plan(bad_words=[SINGLE]).sequences[0].automaton is None


def test_bad_words_of_several_tokens_are_no_part_of_the_text() -> None:
    made = apply_token_rules(SamplingParams(bad_words=[SINGLE, f"  {SEVERAL}"]), TOKENIZER, ENGINE)
    assert made.structured_outputs == StructuredOutputsParams(excluded_words=(SEVERAL,))
    assert made.token_biases
    assert plan(bad_words=[SEVERAL]).sequences[0].automaton is not None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.sampled_from(["a", "b", "é", "c", "aab", "<|x|>"]), max_size=8).map("".join),
)
def test_a_text_is_taken_unless_it_holds_one_of_the_words(words: list[str], text: str) -> None:
    automaton = PlainAutomaton(compile_structured(StructuredOutputsParams(excluded_words=words)).data)
    place = automaton.start
    data = text.encode()
    held = min((at + len(word.encode()) for word in words if (at := data.find(word.encode())) >= 0), default=None)
    for count, byte in enumerate(data, 1):
        place = automaton.take(place, byte)
        assert (place is None) == (held is not None and count >= held)
        if place is None:
            return
        assert automaton.may_end(place)


def test_special_tokens_may_stand_in_a_text_without_words() -> None:
    automaton = PlainAutomaton(compile_structured(StructuredOutputsParams(excluded_words=["ab"])).data)
    place = automaton.start
    for byte in b"a\xffb<think>":
        place = automaton.take(place, byte)
        assert place is not None


class _Coder:
    """A tokenizer with fill-in tokens: each letter is a token."""

    max_token_chars = 1

    def token_id(self, text: str) -> int | None:
        return {"<fim_prefix>": 200, "<fim_suffix>": 201, "<fim_middle>": 202}.get(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())


def test_a_suffix_stands_behind_the_prompt_between_the_models_own_tokens() -> None:
    tokenizer: Any = _Coder()
    rules = PromptRules(add_special_tokens=True)
    found = fill_in("ab", "c", rules, tokenizer, ENGINE).tolist()
    assert found == [1, 200, 97, 98, 201, 99, 202]
    assert fill_in([5], "c", RULES, tokenizer, ENGINE).tolist() == [200, 5, 201, 99, 202]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    folder: Path = tmp_path_factory.mktemp("metrics")
    server = FakeServer(FrontendConfig(model=MODEL, region="test-token-rules"), ASSETS, folder)
    yield server
    server.close()


MESSAGES = [
    {"role": "user", "content": "Name a fish."},
    {"role": "assistant", "content": [{"type": "text", "text": "A"}]},
]


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        ("completions", "suffix", {"prompt": "x = ", "suffix": "\n"}),
        ("completions", "suffix", {"prompt": "x = ", "suffix": "\n", "echo": True}),
        ("chat/completions", "suffix", {"suffix": "x"}),
        ("chat/completions", "thinking_token_budget", {"thinking_token_budget": 40}),
        ("chat/completions", "prompt_logprobs", {"prompt_logprobs": -1}),
        ("completions", "logprobs", {"prompt": "a", "logprobs": -1}),
        ("completions", "bad_words", {"prompt": "a", "bad_words": ["ok", ""]}),
        ("completions", "allowed_token_ids", {"prompt": "a", "allowed_token_ids": [1, -4]}),
        ("chat/completions", "repeat_penalty", {"repeat_penalty": 1.1}),
        ("completions", "format", {"prompt": "a", "format": "json"}),
        ("chat/completions", "return_prompt_text", {"return_prompt_text": True}),
    ],
)
def test_a_body_that_asks_for_too_much_is_refused_by_name(
    server: FakeServer, path: str, field: str, fields: dict[str, Any]
) -> None:
    body = fields if path == "completions" else {"messages": MESSAGES, **fields}
    answer = server.post(f"/v1/{path}", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_bodies_carry_their_rules_to_the_engine(server: FakeServer) -> None:
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": MESSAGES})):
        fields = {"allowed_token_ids": [11, 12], "thinking_token_budget": -1, "session_id": "s", "stream_interval": 3}
        assert server.post(f"/v1/{path}", body | fields).status_code == 200
        assert {token for token, _ in server.engine.submitted[-1].params.biases} == {11, 12}
        assert server.post(f"/v1/{path}", body | {"bad_words": [SEVERAL]}).status_code == 200
        assert server.engine.submitted[-1].automaton is not None


@pytest.mark.parametrize("continues", [True, False])
def test_a_chats_echo_is_the_last_message_where_it_is_the_replys_own(server: FakeServer, continues: bool) -> None:
    messages = MESSAGES if continues else MESSAGES[:1]
    body = {
        "messages": messages,
        "max_tokens": 1,
        "echo": True,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
    }
    plain = server.post("/v1/chat/completions", body | {"echo": False}).json()["choices"][0]["message"]["content"]
    echoed = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert echoed == ("A" if continues else "") + plain
    server.post("/v1/chat/completions", body | {"stream": True})
    assert server.writer.written.count(b'"content":"A"') == continues
