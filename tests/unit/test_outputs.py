# SPDX-License-Identifier: Apache-2.0
"""What `LLM` takes and returns in vLLM's form, without an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blink
from blink.beam_search_params import BeamSearchParams
from blink.errors import BadRequestError, ConfigError
from blink.models.weights.text_files import read_json
from blink.offline.absent import Absent
from blink.offline.beam_search import search_beams
from blink.offline.gathered import GatheredOutput
from blink.offline.local_engine import priorities_of, refuse, rules_of
from blink.offline.options import AsyncEngineArgs, read_options
from blink.offline.public_tokenizer import PublicTokenizer
from blink.outputs import Logprob, logprobs_of
from blink.region.layout import FinishReason
from blink.request.planner import Plan, PlannedSequence, Planner
from blink.request.source import Source, source_of
from blink.sampling_params import MAX_LOGIT_BIASES, RequestOutputKind, SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from blink.text.generation import TokenLogprob
from blink.text.prompt import PromptRules
from fake_engine import ENGINE
from small_tokenizer import load_small_assets
from tiny_model import write_tiny_model

ASSETS = load_small_assets()
TEXT = "red fish"


def encode(text: str) -> list[int]:
    return ASSETS.tokenizer.encode(text, add_special_tokens=False)


def plan(params: SamplingParams, prompt: str = "One") -> Plan:
    return Planner(ASSETS).plan_now([prompt], params, PromptRules(add_special_tokens=False), ENGINE)


def feed(planned: PlannedSequence, tokens: list[int], last: FinishReason = FinishReason.NONE) -> None:
    for place, token in enumerate(tokens):
        planned.generation.add_top_logprob(7, -0.25)
        planned.generation.add_token(token, -0.5, last if place == len(tokens) - 1 else FinishReason.NONE)


def gather(params: SamplingParams) -> tuple[Plan, GatheredOutput]:
    made = plan(params)
    return made, GatheredOutput("9", Source("One"), made, ASSETS.tokenizer)


def test_an_output_has_vllms_fields() -> None:
    made, gathered = gather(SamplingParams(logprobs=1, prompt_logprobs=0, max_tokens=50))
    made.sequences[0].generation.prompt_logprobs = [TokenLogprob(5, -2.0, [])] * (made.prompts[0].num_tokens - 1)
    feed(made.sequences[0], encode(TEXT), FinishReason.LENGTH)
    output = gathered.take()
    [choice] = output.outputs
    assert (output.request_id, output.prompt, output.finished, output.num_cached_tokens) == ("9", "One", True, 0)
    assert (output.metrics, output.lora_request, output.encoder_prompt) == (None, None, None)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert (choice.text, list(choice.token_ids), choice.finished()) == (TEXT, encode(TEXT), True)
    assert choice.cumulative_logprob == pytest.approx(-0.5 * len(encode(TEXT)))
    assert choice.logprobs is not None
    assert choice.logprobs[0] == {
        encode(TEXT)[0]: Logprob(-0.5, None, ASSETS.tokenizer.token_text(encode(TEXT)[0])),
        7: Logprob(-0.25, 1, ASSETS.tokenizer.token_text(7)),
    }


def test_what_was_not_asked_for_is_none() -> None:
    made, gathered = gather(SamplingParams(max_tokens=50, detokenize=False))
    feed(made.sequences[0], encode(TEXT), FinishReason.LENGTH)
    [choice] = gathered.take().outputs
    assert (choice.text, choice.logprobs, choice.cumulative_logprob) == ("", None, None)
    assert gathered.take().prompt_logprobs is None


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_each_output_holds_what_its_kind_says(kind: RequestOutputKind) -> None:
    made, gathered = gather(SamplingParams(n=2, max_tokens=50, output_kind=kind))
    tokens = encode(TEXT)
    feed(made.sequences[0], tokens[:1])
    first = gathered.take()
    feed(made.sequences[0], tokens[1:], FinishReason.LENGTH)
    second = gathered.take()
    feed(made.sequences[1], tokens, FinishReason.LENGTH)
    last = gathered.take()
    shown = [[(each.index, list(each.token_ids)) for each in output.outputs] for output in (first, second, last)]
    if kind is RequestOutputKind.DELTA:
        assert shown == [[(0, tokens[:1])], [(0, tokens[1:])], [(1, tokens)]]
    else:
        assert shown == [[(0, tokens[:1]), (1, [])], [(0, tokens), (1, [])], [(0, tokens), (1, tokens)]]
    assert [output.finished for output in (first, second, last)] == [False, False, True]


def test_older_names_of_a_positions_logprobs_warn() -> None:
    position = logprobs_of(ASSETS.tokenizer, TokenLogprob(5, -3.0, [(8, -0.5), (9, -0.75)]))
    with pytest.warns(DeprecationWarning, match="next version"):
        assert (position.token, position.logprob, position.top) == (5, -3.0, [(8, -0.5), (9, -0.75)])


@pytest.mark.parametrize(
    ("prompt", "source"),
    [
        ({"prompt": "a", "cache_salt": "s"}, Source("a", "s")),
        ({"prompt_token_ids": [4, 5], "prompt": "shown"}, Source([4, 5], None, "shown")),
        ({"prompt": "a", "multi_modal_data": None}, Source("a")),
        ({"prompt_token_ids": []}, Source([])),
    ],
)
def test_a_prompt_may_have_vllms_forms(prompt: Any, source: Source) -> None:
    assert source_of(prompt) == source


@pytest.mark.parametrize("prompt", [{"prompt": "a", "multi_modal_data": {"image": 1}}, {"prompt": 3}, {"prompt": None}])
def test_a_prompt_of_another_form_is_refused(prompt: Any) -> None:
    with pytest.raises(BadRequestError):
        source_of(prompt)


def test_parameters_are_positional_mutable_and_cloned() -> None:
    params = SamplingParams(2, 0.5, 0.25, 1.5, 0.75, 0.9, 40, 0.125)
    assert (params.n, params.presence_penalty, params.top_k, params.min_p) == (2, 0.5, 40, 0.125)
    copy = params.clone()
    copy.max_tokens = 3
    assert (params.max_tokens, copy.max_tokens, copy == params) == (16, 3, False)
    assert SamplingParams.from_optional(n=None, max_tokens=None, temperature=0.5) == SamplingParams(
        temperature=0.5, max_tokens=None
    )
    assert SamplingParams(seed=-1, stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()
    form = StructuredOutputsParams(regex="a+")
    assert SamplingParams(guided_decoding=form) == SamplingParams(structured_outputs=form)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1.5),
        ("max_tokens", "8"),
        ("seed", True),
        ("temperature", "hot"),
        ("top_k", 2.5),
        ("prompt_logprobs", -1),
        ("logprobs", 21),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("truncate_prompt_tokens", 0),
        ("stream_interval", 0),
        ("logprob_token_ids", [*range(21)]),
        ("repetition_detection", {"min_count": 3}),
    ],
)
def test_a_wrong_parameter_is_a_value_error_that_names_it(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})  # pyright: ignore[reportArgumentType]
    assert isinstance(caught.value, BadRequestError) and caught.value.param == name


def test_stop_strings_need_the_text() -> None:
    with pytest.raises(BadRequestError, match="detokenize"):
        SamplingParams(detokenize=False, stop="x")


def test_a_prompt_is_cut_as_its_parameters_say() -> None:
    tokens = encode(TEXT * 3)
    for keep in (1, 4):
        made = plan(SamplingParams(truncate_prompt_tokens=keep), TEXT * 3)
        assert made.prompts[0].tokens.tolist() == tokens[-keep:]


def test_a_prompt_that_skips_the_cache_shares_no_block() -> None:
    def root(params: SamplingParams) -> bytes:
        return plan(params).prompts[0].origin.hash_root

    assert root(SamplingParams()) == root(SamplingParams(skip_reading_prefix_cache=False))
    assert len({root(SamplingParams(skip_reading_prefix_cache=True)) for _ in range(3)} | {root(SamplingParams())}) == 4


def test_a_beam_search_returns_outputs_that_begin_with_the_prompt() -> None:
    prompt = encode(TEXT)
    likely = [(prompt[0], -0.5), (prompt[1], -1.0)]
    params = BeamSearchParams(beam_width=1, max_tokens=2, ignore_eos=True)
    step = [TokenLogprob(*likely[1], likely)]
    [output] = search_beams([np.array(prompt, np.int32)], params, ASSETS, lambda beams: step * len(beams))
    [sequence] = output.sequences
    assert sequence.tokens == [*prompt, prompt[0], prompt[0]] and sequence.cum_logprob == -1.0
    assert sequence.text == ASSETS.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)
    assert [[*position] for position in sequence.logprobs] == [[prompt[0], prompt[1]]] * 2
    assert [position[prompt[1]].rank for position in sequence.logprobs] == [2, 2]


def test_the_tokenizer_has_the_methods_of_transformers() -> None:
    tokenizer = PublicTokenizer(ASSETS)
    ids = tokenizer(TEXT).input_ids
    assert tokenizer.decode(ids) == TEXT and tokenizer.decode(ids[0]) == ASSETS.tokenizer.token_text(ids[0])
    assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids)) == ids
    assert tokenizer.batch_decode(tokenizer([TEXT, "One"])["input_ids"]) == [TEXT, "One"]
    assert len(tokenizer) == tokenizer.vocab_size and tokenizer.eos_token_id in ASSETS.eos_token_ids
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str) and "Hi" in text
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True) == tokenizer.encode(
        text, add_special_tokens=False
    )
    assert tokenizer.apply_chat_template(chat, chat_template="<{{ messages[0].content }}>", tokenize=False) == "<Hi>"


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": "4k"},
        {"max_num_seqs": 2.5},
        {"enable_prefix_caching": 1},
        {"device": "tpu"},
        {"no_such_option": 1},
        {"pipeline_parallel_size": 2},
    ],
)
def test_an_option_of_another_kind_is_a_value_error(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).replace("_", ".")) as caught:
        read_options(str(write_tiny_model(tmp_path)), options)
    assert isinstance(caught.value, ConfigError)


def test_options_of_vllm_that_change_nothing_are_taken(tmp_path: Path) -> None:
    given = AsyncEngineArgs(str(write_tiny_model(tmp_path)), tensor_parallel_size=1, trust_remote_code=True)
    given.max_model_len = 77  # pyright: ignore[reportAttributeAccessIssue]
    found = read_options(given.model, {**given.options, "enforce_eager": True, "chat_template": "{{ 1 }}"})
    assert (found.engine.model.max_model_len, found.frontend.chat_template) == (77, "{{ 1 }}")


def test_arguments_that_ask_for_what_is_not_here_are_refused() -> None:
    for call in (
        lambda: refuse(lora_request=object()),
        lambda: priorities_of([1, 2], 3),
        lambda: rules_of("prompt", add_special_tokens=True, given={"padding": True}),
        *(getattr(Absent(), name) for name in ("encode", "classify", "apply_model", "get_metrics")),
    ):
        with pytest.raises(BadRequestError):
            call()
    refuse(lora_request=None)
    rules = rules_of("prompt", add_special_tokens=True, given={"add_special_tokens": False, "truncation_side": "right"})
    assert (rules.add_special_tokens, rules.truncate_right) == (False, True)


def test_a_file_that_cannot_be_read_is_told_once(tmp_path: Path) -> None:
    """A ConfigError is a ValueError, as those of JSON are."""
    with pytest.raises(ConfigError) as caught:
        read_json(tmp_path / "none.json")
    assert caught.value.message.count("none.json") == 1


@pytest.mark.parametrize("name", blink.__all__)
def test_every_name_of_the_package_is_there(name: str) -> None:
    assert getattr(blink, name) is not None


def test_options_of_a_server_have_no_effect_on_an_engine_in_this_process(tmp_path: Path) -> None:
    options = {"disable_log_stats": True, "max_num_queued_reqs": 5, "max_num_seqs": 3, "region": "test-options"}
    assert read_options(str(write_tiny_model(tmp_path)), options).engine.max_num_seqs == 3


@pytest.mark.parametrize(
    "params",
    [
        {"logprob_token_ids": [*range(21)]},
        {"logprob_token_ids": [1, 2], "logprobs": 5},
        {"logprob_token_ids": [1], "logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0)},
    ],
)
def test_named_logprobs_have_their_bounds(params: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        SamplingParams(**params)
    named = SamplingParams(logprob_token_ids=[7, 3, 7], logit_bias={5: 1.0}, logprobs=2)
    assert (named.logprobs, named.biases[:2]) == (2, [(7, 0.0), (3, 0.0)])
    assert replace(named, n=2).logprob_token_ids == [7, 3]
    assert SamplingParams(logprob_token_ids=[]).logprobs is None
