# SPDX-License-Identifier: Apache-2.0
"""Constrained generation on a real CPU engine: texts have their form, and all other parameters keep their meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from blink import LLM, SamplingParams
from blink.errors import BadRequestError
from blink.grammar.compiler import compile_structured
from blink.llm import CompletionOutput
from blink.models.weights.files import default_model_path
from blink.structured_outputs import StructuralTag, StructuredOutputsParams, Tag
from json_schemas import PROGRAMS, read_suite
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model's tokenizer is not downloaded"),
]
PROMPT = "Some JSON: "


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model of random weights: it prefers nothing, so each text is held by its form alone.

    So few blocks that sequences preempt each other and are computed again.
    """
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    sizes = {"max_model_len": 400, "num_gpu_blocks_override": 26, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with LLM(str(folder), load_format="dummy", tokenizer=str(default_model_path()), cpu_threads=1, **sizes) as llm:
        yield llm


def generate(llm: LLM, structured: dict[str, Any], prompt: str = PROMPT, **params: Any) -> list[CompletionOutput]:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 300, "seed": 1, **params}
    chosen = SamplingParams(structured_outputs=StructuredOutputsParams(**structured), **options)
    return llm.generate(prompt, chosen, use_tqdm=False)[0].outputs


def test_texts_of_all_forms_are_valid_while_sequences_preempt_each_other(llm: LLM) -> None:
    names = ["people", "tagged union", "tuple", "patterns", "values", "all of", "linked list"]
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=300,
            n=2,
            seed=3,
            structured_outputs=StructuredOutputsParams(json=PROGRAMS[name]),
        )
        for name in names
    ]
    before = llm.stats()
    outputs = llm.generate([f"{name}: {PROMPT * 20}" for name in names], params, use_tqdm=False)
    after = llm.stats()
    num_ended = 0
    assert {each.finish_reason for output in outputs for each in output.outputs} <= {"stop", "length"}
    for name, output in zip(names, outputs, strict=True):
        for text in (each.text for each in output.outputs if each.finish_reason == "stop"):
            jsonschema.validate(json.loads(text), PROGRAMS[name])
            num_ended += 1
    assert num_ended >= 10
    assert after["num_preemptions"] > before["num_preemptions"]
    assert after["automata_loaded"] - before["automata_loaded"] == len(names)  # one for both sequences of a request
    assert after["num_automata_used"] == 0 and after["prompt_arena_used_bytes"] == 0


def test_each_seed_has_its_text_whatever_runs_beside_it(llm: LLM) -> None:
    form = {"regex": "[a-z ]{20,60}"}
    alone = [generate(llm, form, seed=seed)[0].token_ids for seed in (1, 2)]
    beside = generate(llm, form, seed=1, n=6)
    assert [beside[0].token_ids, beside[1].token_ids] == alone
    assert len({each.text for each in beside}) == 6


def test_greedy_texts_are_the_likeliest_of_their_form(llm: LLM) -> None:
    """The logprobs are those of all tokens, and the sampled one is the first of them that the form allows."""
    found = generate(llm, {"regex": "[0-9]{8}"}, temperature=0.0, logprobs=20)[0]
    assert re.fullmatch("[0-9]{8}", found.text)
    for token, position in zip(found.token_ids, found.logprobs or [], strict=True):
        ranked = [entry for entry in position.values() if entry.rank is not None]
        assert len(ranked) == 20 and position[token].logprob <= max(entry.logprob for entry in ranked)


@pytest.mark.parametrize("choices", [["alpha", "beta"], ["one", "one more"]])
def test_a_choice_is_made_and_ends(llm: LLM, choices: list[str]) -> None:
    outputs = generate(llm, {"choice": choices}, n=6)
    assert {each.text for each in outputs} <= set(choices)
    assert {each.finish_reason for each in outputs} == {"stop"}


def test_without_an_end_token_a_complete_text_ends_all_the_same(llm: LLM) -> None:
    found = generate(llm, {"regex": "[ab]{3}"}, ignore_eos=True)[0]
    assert re.fullmatch("[ab]{3}", found.text) and found.finish_reason == "stop"


def test_max_tokens_stop_strings_min_tokens_and_biases_keep_their_meaning(llm: LLM) -> None:
    cut = generate(llm, {"regex": "[a-z]{200,}"}, max_tokens=5)[0]
    assert cut.finish_reason == "length" and len(cut.token_ids) == 5
    stopped = generate(llm, {"regex": "x(ab){5}END"}, stop=["aba"])[0]
    assert stopped.text == "x" and stopped.stop_reason == "aba"
    long = generate(llm, {"regex": "a*"}, min_tokens=30, max_tokens=40)[0]
    assert len(long.token_ids) >= 30
    # The form goes before: there is no longer text.
    assert generate(llm, {"choice": ["yes"]}, min_tokens=30)[0].text == "yes"
    yes, no = (llm.get_tokenizer().encode(text, add_special_tokens=False)[0] for text in ("yes", "no"))
    for wanted, other, text in ((yes, no, "yes"), (no, yes, "no")):
        biased = generate(llm, {"choice": ["yes", "no"]}, n=4, logit_bias={wanted: 100, other: -100})
        assert {each.text for each in biased} == {text}


def test_tagged_texts_are_free_until_their_trigger(llm: LLM) -> None:
    call = Tag("<call>", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}, "</call>")
    forced = generate(llm, {"structural_tag": StructuralTag(tags=[call], max_tags=1)})[0]
    assert re.fullmatch(r'<call>\{"n":[12]\}</call>', "".join(forced.text.split()))
    pushed = dict.fromkeys(llm.get_tokenizer().encode("<call>", add_special_tokens=False), 100.0)
    auto = {"structural_tag": StructuralTag(tags=[call], trigger="<call>")}
    texts = [each.text for each in generate(llm, auto, n=8, logit_bias=pushed, max_tokens=60)]
    calls = [text.split("<call>")[1] for text in texts if "<call>" in text]
    assert calls and all(re.match(r'\{("n":([12](\}(<(/c|$)|$)|$)|$)|$|"n?$)', "".join(text.split())) for text in calls)


def test_what_cannot_be_compiled_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.stats()["prompt_tokens"]
    with pytest.raises(BadRequestError, match="dynamicRef"):
        generate(llm, {"json": {"$dynamicRef": "#x"}})
    assert llm.stats()["prompt_tokens"] == before


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_default_model_keeps_every_schema_of_the_public_suite() -> None:
    """Five texts at temperature 1 of each schema that compiles; those that reach their limit are no JSON yet.

    Most schemas have a text that ends. A random number or free text seldom does within the limit.
    """
    # jsonschema gives patterns to Python's re, which has no \p{...}.
    cases = [case for case in read_suite() if can_compile(case.schema) and "\\p{" not in json.dumps(case.schema)]
    params = [
        SamplingParams(
            temperature=1.0, n=5, seed=1, max_tokens=150, structured_outputs=StructuredOutputsParams(json=case.schema)
        )
        for case in cases
    ]
    num_valid, endless = 0, 0
    with LLM(max_model_len=256, max_num_seqs=64) as llm:
        results = llm.generate([PROMPT] * len(cases), params)
    for case, result in zip(cases, results, strict=True):
        validator = jsonschema.Draft202012Validator(case.schema)
        for output in result.outputs:
            if output.finish_reason == "length":
                continue
            assert output.finish_reason == "stop"
            assert validator.is_valid(json.loads(output.text)), (case, output.text)
            num_valid += 1
        endless += all(output.finish_reason == "length" for output in result.outputs)
    print(f"{num_valid} texts are valid; of {len(cases)} schemas, {endless} have none that ended")
    assert num_valid > 900 and endless < 0.3 * len(cases)


def can_compile(schema: Any) -> bool:
    try:
        compile_structured(StructuredOutputsParams(json=schema))
    except BadRequestError:
        return False
    return True
