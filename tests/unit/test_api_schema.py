# SPDX-License-Identifier: Apache-2.0
"""Request bodies: what is taken, what is refused by name, what is ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from blink.api.http.errors import describe_validation
from blink.api.openai.responses.schema import ResponsesBody
from blink.api.openai.sampling import build_sampling_params
from blink.api.openai.schema import ChatBody, CompletionBody
from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.request.planner import check_request

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {}),
        ("ebnf", "root ::= x"),
        ("options", {"num_ctx": 5}),
        ("n_predict", 4),
        ("vllm_xargs", 3),
        ("suffix", "x"),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("functions", 3),
        ("function_call", {"name": "f"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("top_logprobs", 2),
        ("stream_options", {"include_usage": True}),
        ("chat_template", 3),
        ("prompt_embeds", "x"),
    ],
)
def test_unsupported_requests_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises((BadRequestError, ValidationError)) as caught:
        ChatBody.model_validate({"messages": MESSAGES, field: value})
    error = caught.value
    named = error.param if isinstance(error, BadRequestError) else error.errors()[0]["loc"][0]
    assert named == field


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "suffix": None, "best_of": 1, "n": None, "use_beam_search": False},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tools": [], "tool_choice": None, "modalities": ["text"], "function_call": None},
        {"made_up_field": 1, "user": "me", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": True},
    ],
)
def test_requests_that_ask_for_nothing_special_pass(fields: dict[str, Any]) -> None:
    assert ChatBody.model_validate({"messages": MESSAGES, **fields}).messages == MESSAGES


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_all_four_forms_of_a_prompt_become_a_list(prompt: Any, prompts: list[Any]) -> None:
    assert CompletionBody.model_validate({"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize("prompt", [None, 3, [1, "a"], ["a", 1], [[1], "a"], [1.5], [True], [[1, None]], {"a": 1}])
def test_mixed_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"prompt": prompt})


def test_many_errors_are_cut_to_ten_and_quote_nothing() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": "x", "logit_bias": {str(i): "secret" for i in range(50)}})
    error = describe_validation(caught.value.errors())
    assert error.message.count("logit_bias.") == 10
    assert "and 40 more errors" in error.message
    assert "secret" not in error.message
    assert error.param == "logit_bias"


def test_a_list_is_refused_at_its_first_wrong_item() -> None:
    for prompt in ([1] + ["secret"] * 50, ["x"] + [1] * 50, [[1], *["x"] * 50]):
        with pytest.raises(ValidationError) as caught:
            CompletionBody.model_validate({"prompt": prompt})
        assert len(caught.value.errors()) == 1


ENGINE = RegionInfo(
    max_model_len=64,
    vocab_size=100,
    block_size=16,
    model="m",
    hash_key=b"",
    max_sequences=8,
    prefix_caching=False,
    scheduling_policy="fcfs",
    num_queue_pairs=1,
)


def params_of(body: dict[str, Any], defaults: dict[str, float | int] | None = None, priority: bool = False) -> Any:
    """What a request asks for, after all checks of its parameters."""
    fields = {"prompt": "x", "max_tokens": 5, **body}
    params = build_sampling_params(CompletionBody.model_validate(fields), defaults or {})
    check_request(params, 1, replace(ENGINE, scheduling_policy="priority") if priority else ENGINE)
    return params


def test_the_model_defaults_apply_only_where_the_client_is_silent() -> None:
    defaults = {"temperature": 0.2, "top_p": 0.9, "top_k": 40}
    params = params_of({"temperature": 0.0, "top_p": None}, defaults)
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.9, 40)
    assert params_of({}).temperature == 1.0


def test_logit_biases_are_by_token_id_and_within_their_bounds() -> None:
    assert params_of({"logit_bias": {"7": 100, "8": -0.5, "9": -100}}).logit_bias == {7: 100.0, 8: -0.5, 9: -100.0}
    for bias in (100.5, -101, 1e9, -1e300, "Infinity"):
        with pytest.raises(BadRequestError, match=r"logit_bias must be in \[-100, 100\]") as caught:
            params_of({"logit_bias": {"7": bias}})
        assert caught.value.param == "logit_bias"
    for key in ("100", "-1", "x", "\u0661", "9" * 5000):
        with pytest.raises(BadRequestError) as caught:
            params_of({"logit_bias": {key: 1}})
        assert caught.value.param == "logit_bias"


def test_wrong_keys_of_logit_biases_are_told_together() -> None:
    with pytest.raises(BadRequestError, match=r"logit_bias: 'not_a_token', '-1' are not token ids of this model\."):
        params_of({"logit_bias": {"not_a_token": 1, "5": 1, "-1": 1}})
    with pytest.raises(BadRequestError, match=r"logit_bias: 'k0', .*'k9' and 40 more are not token ids"):
        params_of({"logit_bias": {f"k{i}": 1 for i in range(50)}})
    with pytest.raises(BadRequestError, match="logit_bias: 100 is not a token id of this model, which has 100"):
        params_of({"logit_bias": {"100": 1}})


def test_priority_needs_the_priority_policy() -> None:
    with pytest.raises(BadRequestError) as caught:
        params_of({"priority": 1})
    assert caught.value.param == "priority"
    assert params_of({"priority": -3}, priority=True).priority == -3


def test_only_the_flex_tier_is_best_effort() -> None:
    tiers = ("flex", "auto", "default", None)
    assert [params_of({"service_tier": tier}).best_effort for tier in tiers] == [True, False, False, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 1e-50),  # 0 in float32
        ("repetition_penalty", 1e-50),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("min_tokens", 6),
        ("logprobs", 21),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop_token_ids", [100]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"1": float("nan")}),
        ("max_tokens", 0),
        ("tpot_target_ms", -1),
        ("tpot_target_ms", 10_001),
        ("tpot_target_ms", 1e-4),
        ("tpot_target_ms", float("nan")),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        params_of({field: value})
    assert caught.value.param == field


SCHEMA = {"type": "object", "properties": {"v": {"enum": ["a", "b"]}}, "required": ["v"]}


def form_of(**form: Any) -> Any:
    body = CompletionBody.model_validate({"prompt": "x", "response_format": form})
    return build_sampling_params(body, {}).structured_outputs


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    ],
)
def test_a_schema_is_kept_wherever_it_stands(form: dict[str, Any]) -> None:
    assert json.loads(form_of(**form).json) == SCHEMA


def test_a_json_object_without_a_schema_is_any_object() -> None:
    for schema in (None, {}, True):
        assert form_of(type="json_object", schema=schema).json_object is True
    assert form_of(type="json_object").json_object is True
    assert form_of(type="text") is None


@pytest.mark.parametrize(
    "form",
    [
        {"type": "text", "schema": SCHEMA},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "json_object", "schema": "an object"},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "scheme": 1}},
        {"type": "json_schema"},
    ],
)
def test_what_a_response_format_cannot_say_is_refused_by_name(form: dict[str, Any]) -> None:
    with pytest.raises((BadRequestError, ValidationError)) as caught:
        form_of(**form)
    error = caught.value
    assert (error.param if isinstance(error, BadRequestError) else error.errors()[0]["loc"][0]) == "response_format"


@pytest.mark.parametrize("form", [{"schema": SCHEMA}, {"scheme": SCHEMA}])
def test_responses_keep_a_schema_too_or_refuse_the_field(form: dict[str, Any]) -> None:
    fields = {"input": "hi", "text": {"format": {"type": "json_object", **form}}}
    if "schema" in form:
        params = build_sampling_params(ResponsesBody.model_validate(fields).chat, {})
        assert params.structured_outputs is not None and json.loads(str(params.structured_outputs.json)) == SCHEMA
    else:
        with pytest.raises(BadRequestError) as caught:
            ResponsesBody.model_validate(fields)
        assert caught.value.param == "text"


def test_nothing_is_generated_only_where_the_prompt_is_echoed() -> None:
    assert params_of({"max_tokens": 0, "echo": True, "logprobs": 1}).max_tokens == 0
    for fields in ({"max_tokens": 0}, {"max_completion_tokens": 0}):
        with pytest.raises(BadRequestError) as caught:
            build_sampling_params(ChatBody.model_validate({"messages": MESSAGES, **fields}), {})
        assert caught.value.param == "max_tokens"
