# SPDX-License-Identifier: Apache-2.0
"""The CPU engine with and without speculation: tokens, logprobs and finish reasons are equal.

Kernels of GGUF formats give a row the same bits beside any others: there the bits of logprobs are equal. Those of
float32 weights do not, so there only their values are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from blink.config import EngineConfig
from blink.errors import ConfigError
from blink.models.weights.files import default_model_path
from blink.structured_outputs import StructuredOutputsParams
from eagle_heads import draw_head, write_head
from free_drafts import load_without_costs
from processes import Frontend, start_frontend, stop
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model's tokenizer is not downloaded"),
]
REGION = f"test-speculation-{os.getpid()}"
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
METHODS: Mapping[str, Mapping[str, Any]] = {"ngram": SPECULATIVE, "suffix": {"method": "suffix"}}
SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 5,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["fruit", "tree"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    },
}
CALLS = r'(<tool_call>\{"name": "weather", "arguments": \{"city": "(Rome|Bonn)"\}\}</tool_call>){2,4}'
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "bias": {"logit_bias": {28: 4.0, 260: 3.0, 284: -50.0}},
    "logprobs": {"logprobs": 5},
    "schema": {"structured_outputs": {"json": SCHEMA}},
    "tools": {"structured_outputs": {"regex": CALLS}},
    "n = 2": {"n": 2},
    "stop strings": {"stop": ["the", "ing"]},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [28, 284, 1003, 198, 30]},
}
MOST_TOKENS = {"tools": 72}  # the second call, which repeats the first, begins behind 24
VOCAB = 49152  # of the tokenizer
FEW_TOKENS = [28, 260, 284, *range(1000, 1012, 3)]
FREQUENT = [28, 30, 198, 253, 260, 282, 284, 288, 314, 327, 338, 355]  # punctuation, the, of, and, to, is, for
TEMPERATURES = (0.0, 0.8, 1.5)
SUBJECTS = ("apples", "the sea", "old maps", "trains", "winter", "a river", "bread", "clocks", "birds", "stone walls")
FORMS = (
    "List ten facts about {0}. Each begins with: A fact about {0} is that",
    "{0}, {0}, {0}, {0},",
    "Repeat these words exactly: {0} are {0} and {0} are {0}.",
    "for item in ['{0}', '{0} again', '{0} once more']:\n    print(item)\nfor item in",
)
PROMPTS = [form.format(subject) for subject in SUBJECTS for form in FORMS]


def load(model: str, **options: Any) -> LLM:
    usual = {"max_num_seqs": 8, "enable_prefix_caching": False, "max_model_len": 512, "cpu_threads": 1}
    return load_without_costs(model, **usual | options)


def outcomes(llm: LLM, prompt: str, temperature: float, kind: Mapping[str, Any], max_tokens: int) -> list[Any]:
    """Return all that a request tells of its choices."""
    return outcomes_of(llm, [prompt], temperature, kind, max_tokens)[0]


def outcomes_of(
    llm: LLM, prompts: list[str], temperature: float, kind: Mapping[str, Any], max_tokens: int
) -> list[list[Any]]:
    """Return all that requests at once tell of their choices."""
    chosen: dict[str, Any] = {"temperature": temperature, "seed": 11, "max_tokens": max_tokens, "logprobs": 0, **kind}
    if form := chosen.pop("structured_outputs", None):
        chosen["structured_outputs"] = StructuredOutputsParams(**form)
    return [
        [
            (
                choice.text,
                [*choice.token_ids],
                [{token: each.logprob for token, each in place.items()} for place in choice.logprobs or ()],
                choice.finish_reason,
                choice.stop_reason,
            )
            for choice in found.outputs
        ]
        for found in llm.generate(prompts, SamplingParams(**chosen), use_tqdm=False)
    ]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, LLM]]:
    """A model of random weights, without speculation and with each method."""
    model = str(write_tiny_model(tmp_path_factory.mktemp("model")))
    options = {"load_format": "dummy", "tokenizer": str(default_model_path())}
    with (
        load(model, **options) as plain,
        load(model, **options, speculative_config=METHODS["ngram"], region=REGION) as ngram,
        load(model, **options, speculative_config=METHODS["suffix"]) as suffix,
    ):
        yield {"plain": plain, "ngram": ngram, "suffix": suffix}


@pytest.fixture
def tiny(engines: Mapping[str, LLM]) -> tuple[LLM, LLM]:
    """The model without and with n-gram drafts."""
    return engines["plain"], engines["ngram"]


@pytest.fixture(scope="module")
def headed(engines: Mapping[str, LLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """The same model without speculation, and with a random draft head that knows a few tokens."""
    folder = tmp_path_factory.mktemp("headed")
    tensors = draw_head(VOCAB, FEW_TOKENS, seed=4)
    head = {"method": "eagle3", "model": str(write_head(folder / "head", tensors, (0, 0, 0)))}
    options = {"load_format": "dummy", "tokenizer": str(default_model_path())}
    with load(str(write_tiny_model(folder / "model")), **options, speculative_config=head) as drafting:
        yield engines["plain"], drafting


def test_an_answer_that_another_request_had_takes_fewer_steps(engines: Mapping[str, LLM]) -> None:
    """The prompt of the second request has nothing of its answer."""
    llm, kind = engines["suffix"], {"logit_bias": dict.fromkeys(range(1000, 1300), 60.0)}
    accepted = list[int]()
    for _ in range(2):
        before = llm.stats()["accepted_tokens"]
        found = outcomes(llm, PROMPTS[5], 1.5, kind, 40)
        accepted.append(llm.stats()["accepted_tokens"] - before)
        assert found[0][:2] == outcomes(engines["plain"], PROMPTS[5], 1.5, kind, 40)[0][:2]
    assert accepted[1] > 30 > accepted[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_changes_no_answer(engines: Mapping[str, LLM], kind: str, method: str) -> None:
    check_kind((engines["plain"], engines[method]), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_head_changes_no_answer(headed: tuple[LLM, LLM], kind: str) -> None:
    before = headed[1].stats()
    check_kind(headed, kind)
    after = headed[1].stats()
    assert after["draft_tokens"] > before["draft_tokens"]
    assert kind not in ("plain", "logprobs", "n = 2") or after["accepted_tokens"] > before["accepted_tokens"]


def ask_for(kind: str) -> tuple[dict[str, Any], int]:
    """Return the parameters of a kind for a model of random weights, and the most tokens of its answers."""
    asked = dict(KINDS[kind])
    if "structured_outputs" in asked:
        return asked, 60
    # Random texts of few tokens repeat themselves.
    return asked | {"logit_bias": dict.fromkeys(FEW_TOKENS, 60.0) | asked.get("logit_bias", {})}, 24


def check_kind(engines: tuple[LLM, LLM], kind: str) -> None:
    """Compare what an engine without drafts and one with them answer."""
    plain, drafting = engines
    asked, most = ask_for(kind)
    for temperature in TEMPERATURES[::2]:
        found, expected = (outcomes(llm, PROMPTS[1], temperature, asked, most) for llm in (drafting, plain))
        assert [each[:2] + each[3:] for each in found] == [each[:2] + each[3:] for each in expected], temperature
        for each, other in zip(found, expected, strict=True):
            for place, known in zip(each[2], other[2], strict=True):
                assert place == pytest.approx(known, abs=1e-4), temperature


def test_a_form_gives_more_than_one_token_a_step(tiny: tuple[LLM, LLM]) -> None:
    """Two calls have most of their tokens in common."""
    plain, drafting = tiny
    before = plain.stats()["num_steps"], drafting.stats()["num_steps"], drafting.stats()["accepted_tokens"]
    found, expected = (outcomes(llm, PROMPTS[0], 0.0, KINDS["tools"], 200) for llm in (drafting, plain))
    assert found[0][:2] == expected[0][:2]
    steps = plain.stats()["num_steps"] - before[0], drafting.stats()["num_steps"] - before[1]
    assert drafting.stats()["accepted_tokens"] - before[2] == steps[0] - steps[1] > steps[0] // 10
    assert plain.stats()["draft_tokens"] == 0


def test_a_prediction_is_counted_in_usage(tiny: tuple[LLM, LLM]) -> None:
    """The same chat again, with its own answer as the prediction."""
    del tiny
    frontend = start_frontend(REGION)
    try:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 24, "temperature": 0}
        body["logit_bias"] = {str(token): 60 for token in FEW_TOKENS}
        first = post(frontend, body)
        text = first["choices"][0]["message"]["content"]
        for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]):
            again = post(frontend, body | {"prediction": {"type": "content", "content": content}})
            assert again["choices"][0]["message"] == first["choices"][0]["message"]
            told = again["usage"]["completion_tokens_details"]
            assert told["accepted_prediction_tokens"] > 4 and told["rejected_prediction_tokens"] >= 0
        assert "accepted_prediction_tokens" not in first["usage"]["completion_tokens_details"]
        metrics = frontend.http.get("/metrics").text
        counted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\d+)", metrics, re.MULTILINE)
        places = re.findall(r"^vllm:spec_decode_num_accepted_tokens_per_pos_total\S* (\d+)", metrics, re.MULTILINE)
        assert counted is not None and int(counted[1]) == sum(map(int, places)) > 0 and len(places) == 15
        wrong = frontend.http.post("/v1/chat/completions", json=body | {"prediction": {"type": "text"}})
        assert wrong.status_code == 400 and "prediction" in wrong.text
    finally:
        stop(frontend.process)


def post(frontend: Frontend, body: dict[str, Any]) -> dict[str, Any]:
    found = frontend.http.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    return found.json()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_changes_no_answer_of_a_real_model(kind: str, method: str) -> None:
    """Bit by bit, as its format is GGUF. test_speculation_matrix.py has all prompts, for a small model."""
    most = MOST_TOKENS.get(kind, 24)
    with load("") as plain, load("", speculative_config=METHODS[method]) as drafting:
        for prompt in PROMPTS[::3]:
            for temperature in TEMPERATURES:
                expected = outcomes(plain, prompt, temperature, KINDS[kind], most)
                assert outcomes(drafting, prompt, temperature, KINDS[kind], most) == expected, (prompt, temperature)
        stats = drafting.stats()
        assert stats["draft_tokens"] > 15 and (stats["accepted_tokens"] > 15 or kind == "penalties")  # of repetition


@pytest.mark.long
@pytest.mark.parametrize("kind", ["penalties", "logprobs", "schema"])
def test_a_draft_head_changes_no_bit_of_a_real_model(kind: str, tmp_path: Path) -> None:
    """The head has random weights, and tokens that are frequent: some of its drafts are accepted."""
    tensors = draw_head(VOCAB, FREQUENT, seed=8, target_hidden=576)
    head = {"method": "eagle3", "model": str(write_head(tmp_path, tensors, (2, 15, 27)))}
    with load("") as plain, load("", speculative_config=head) as drafting:
        for prompt in PROMPTS[::13]:
            for temperature in TEMPERATURES:
                expected = outcomes(plain, prompt, temperature, KINDS[kind], 24)
                assert outcomes(drafting, prompt, temperature, KINDS[kind], 24) == expected, (prompt, temperature)
        assert drafting.stats()["draft_tokens"] > 50


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"method": "glm4_moe_mtp", "num_speculative_tokens": 1}, "glm4_moe_mtp.*not yet"),
        ({"method": "medusa"}, "medusa.*not yet"),
        ({"method": "suffix", "prompt_lookup_min": 2}, "prompt_lookup_min.*suffix"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 8}, "suffix_decoding_max_tree_depth.*ngram"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "max_tree_depth.*between 2 and 64"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "max_cached_requests.*between 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": "1"}, "max_spec_factor.*between 0 and 64"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob.*between 0 and 1"),
        ({"model": "x"}, "draft_model.*not yet"),
        ({"method": "magic"}, "magic.*unknown"),
        ({"method": "ngram", "num_speculative_tokens": 16}, "num_speculative_tokens.*between 1 and 15"),
        ({"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 3}, "prompt_lookup_min.*between 1 and 3"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "rejection_sample_method"),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size"),
    ],
)
def test_what_is_not_done_is_refused_by_name(config: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig(speculative_config=json.dumps(config))
