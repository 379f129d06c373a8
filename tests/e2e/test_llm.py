# SPDX-License-Identifier: Apache-2.0
"""`LLM` in Python: vLLM's forms of prompts and parameters, threads, its end, and that it answers as HTTP does."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from blink import LLM, SamplingParams
from blink.errors import BadRequestError, EngineUnavailableError
from blink.models.weights.files import default_model_path
from blink.region.memory import region_path
from processes import Frontend, start_frontend, stop
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model's tokenizer is not downloaded"),
]
PROMPT = "The capital of France is"
MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
CONTEXT, VOCABULARY, SEQUENCES = 200, 49152, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def load(model: Path, **options: Any) -> LLM:
    return LLM(
        str(model),
        load_format="dummy",
        tokenizer=str(default_model_path()),
        max_model_len=CONTEXT,
        max_sequences_per_worker=SEQUENCES,
        cpu_threads=1,
        **options,
    )


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with load(model, region=f"test-llm-{os.getpid()}") as llm:
        yield llm


@pytest.fixture(scope="module")
def frontend(llm: LLM, model: Path) -> Iterator[Frontend]:
    """An HTTP frontend of the same engine."""
    del llm
    frontend = start_frontend(f"test-llm-{os.getpid()}", str(model), f"--tokenizer={default_model_path()}")
    yield frontend
    stop(frontend.process)


def sampled(seed: int = 1, **params: Any) -> SamplingParams:
    return SamplingParams(**dict[str, Any](seed=seed, max_tokens=12, ignore_eos=True) | params)


def texts(llm: LLM, prompts: Any, params: Any = None) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params or sampled(), use_tqdm=False)]


def test_every_form_of_a_prompt_gives_the_same(llm: LLM) -> None:
    [first] = llm.generate(PROMPT, sampled(), use_tqdm=False)
    tokens = first.prompt_token_ids
    assert (first.prompt, len(tokens)) == (PROMPT, 5)
    forms = [PROMPT, tokens, {"prompt": PROMPT}, {"prompt_token_ids": tokens, "cache_salt": "x"}, np.array(tokens)]
    for form in forms:
        assert texts(llm, form) == [first.outputs[0].text]
    assert texts(llm, forms) == [first.outputs[0].text] * len(forms)
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    "prompt", [{}, {"prompt": 7}, {"prompt_token_ids": "a"}, {"text": "a"}, [[1.5]], [3, "a"], [None]]
)
def test_other_forms_of_a_prompt_are_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        llm.generate(prompt)
    assert caught.value.param == "prompt"


def test_each_prompt_may_have_its_parameters(llm: LLM) -> None:
    params = [sampled(seed=1), sampled(seed=2, n=2, max_tokens=3)]
    first, second = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert [first.outputs[0].text] == texts(llm, PROMPT, params[0])
    assert [output.index for output in second.outputs] == [0, 1]
    assert [len(output.token_ids) for output in second.outputs] == [3, 3]
    assert [output.text for output in second.outputs] == [
        texts(llm, PROMPT, sampled(seed=seed, max_tokens=3))[0] for seed in (2, 3)
    ]
    with pytest.raises(BadRequestError, match="2 prompts need as many"):
        llm.generate([PROMPT, PROMPT], params[:1])


def test_planning_may_take_longer_than_a_lease(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many schemas do that are compiled before the first sequence is submitted."""
    with load(model, lease_timeout=0.5) as llm:
        planner = cast("Any", llm)._planner
        plan = planner.plan_now

        def plan_slowly(*arguments: Any) -> Any:
            time.sleep(0.8)
            return plan(*arguments)

        monkeypatch.setattr(planner, "plan_now", plan_slowly)
        assert len(texts(llm, [PROMPT, PROMPT])) == 2


def test_a_stop_string_is_one_string_and_not_its_letters(llm: LLM) -> None:
    [full] = texts(llm, PROMPT)
    stop_at = full[10:16]
    for stop_form in (stop_at, [stop_at], ("never in it", stop_at)):
        [cut] = llm.generate(PROMPT, sampled(stop=stop_form), use_tqdm=False)
        assert cut.outputs[0].text == full[: full.index(stop_at)]
        assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop_at)
    assert texts(llm, PROMPT, sampled(stop=None)) == [full]


def test_without_max_tokens_the_context_is_the_limit(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, sampled(max_tokens=None), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == CONTEXT - 5
    assert output.outputs[0].finish_reason == "length"


def test_a_chat_is_its_rendered_prompt_and_parts_are_its_text(llm: LLM) -> None:
    [output] = llm.chat(MESSAGES, sampled(), use_tqdm=False)
    parts = [MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    several = llm.chat([MESSAGES, parts], sampled(), use_tqdm=False)
    assert [(each.prompt, each.outputs) for each in several] == [(output.prompt, output.outputs)] * 2
    assert output.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert output.prompt_token_ids == llm.generate(output.prompt, sampled(), use_tqdm=False)[0].prompt_token_ids
    open_end = llm.chat(MESSAGES, sampled(), use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert open_end[0].prompt is not None
    assert open_end[0].prompt.endswith("user\nHello")
    unlike = llm.chat(MESSAGES, sampled(), use_tqdm=False, chat_template_kwargs={"messages": []})
    assert unlike[0].outputs == output.outputs  # what the template gets by other ways stays


def test_a_chat_shows_its_tools(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    [output] = llm.chat(MESSAGES, sampled(max_tokens=1), use_tqdm=False, tools=[tool])
    assert output.prompt is not None and json.dumps(tool) in output.prompt


def test_more_sequences_than_the_engine_holds_take_turns(llm: LLM) -> None:
    prompts = [[100 + i, 200 + i] for i in range(3 * SEQUENCES)]
    assert texts(llm, prompts) == [texts(llm, prompt)[0] for prompt in prompts]


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    prompts = [f"{PROMPT} {place}" for place in range(6)]
    expected = [texts(llm, prompt)[0] for prompt in prompts]
    found: dict[int, list[str]] = {}

    def work(place: int) -> None:
        found[place] = [texts(llm, prompts[place])[0] for _ in range(5)]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == {place: [expected[place]] * 5 for place in range(6)}


# What offline and online requests have in common: equal text, or the same refusal.
REQUESTS: list[dict[str, Any]] = [
    {},
    {"max_tokens": None, "seed": 3},
    {"stop": "e"},
    {"stop": ["zzz", "a", "e"], "include_stop_str_in_output": True},
    {"stop_token_ids": [260, 28], "temperature": 0.5},
    {"logit_bias": {260: 100.0}, "frequency_penalty": 1.0},
    {"n": 3, "best_effort": True},
    {"n": SEQUENCES + 1},
    {"priority": 1},
    {"stop_token_ids": [VOCABULARY]},
    {"stop_token_ids": [-1]},
    {"logit_bias": {VOCABULARY: 1.0}},
    {"max_tokens": CONTEXT},
    {"max_tokens": None, "min_tokens": CONTEXT - 2},
    {"prompt": [5] * CONTEXT},
    {"prompt": "word " * 5000},
    {"prompt": [VOCABULARY]},
    {"prompt": ""},
    {"messages": MESSAGES},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": 3}]},
    {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
    {"messages": MESSAGES, "max_tokens": None, "min_tokens": CONTEXT},
]


@pytest.mark.parametrize("request_fields", REQUESTS, ids=str)
def test_offline_and_online_answer_and_refuse_alike(
    llm: LLM, frontend: Frontend, request_fields: dict[str, Any]
) -> None:
    fields = {"prompt": PROMPT, "seed": 1, "max_tokens": 8, **request_fields}
    assert offline(llm, dict(fields)) == online(frontend, dict(fields))


def offline(llm: LLM, fields: dict[str, Any]) -> Any:
    prompt, messages = fields.pop("prompt"), fields.pop("messages", None)
    rendering = {name: fields.pop(name) for name in ("continue_final_message",) if name in fields}
    params = SamplingParams(**fields)
    try:
        if messages is None:
            [output] = llm.generate([prompt], params, use_tqdm=False)
        else:
            [output] = llm.chat(messages, params, use_tqdm=False, **rendering)
    except BadRequestError as error:
        return error.message, error.param
    return [(one.text, one.finish_reason, one.stop_reason) for one in output.outputs]


def online(frontend: Frontend, fields: dict[str, Any]) -> Any:
    if fields.pop("best_effort", False):
        fields["service_tier"] = "flex"
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    is_chat = "messages" in fields
    if is_chat:
        del fields["prompt"]
    response = frontend.post("/v1/chat/completions" if is_chat else "/v1/completions", **fields).json()
    if "error" in response:
        assert response["error"]["code"] == 400
        return response["error"]["message"], response["error"]["param"]
    return [
        (choice["message"]["content"] if is_chat else choice["text"], choice["finish_reason"], choice["stop_reason"])
        for choice in response["choices"]
    ]


def test_an_engine_in_this_process_works_after_a_pause_longer_than_its_lease(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blink.offline.local_engine._LEASE_GRACE", 0.0)
    with load(model, lease_timeout=2.0) as llm:
        expected = texts(llm, PROMPT)
        time.sleep(3)
        assert texts(llm, PROMPT) == expected
        assert llm.stats()["expired_leases"] > 0


def test_a_priority_is_taken_under_its_policy(model: Path) -> None:
    with load(model, scheduling_policy="priority") as llm:
        assert len(texts(llm, PROMPT, sampled(priority=3))) == 1


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    [expected] = texts(llm, PROMPT)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("select.select", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * SEQUENCES, sampled(max_tokens=None), use_tqdm=False)
    assert texts(llm, [PROMPT] * SEQUENCES) == [expected] * SEQUENCES
    assert llm.stats()["worker_sequences"] == 0


def test_a_closed_llm_says_so_and_has_left_its_region(model: Path) -> None:
    name = f"test-llm-closed-{os.getpid()}"
    llm = load(model, region=name)
    assert region_path(name).exists()
    llm.close()
    llm.close()
    assert not region_path(name).exists()
    with pytest.raises(EngineUnavailableError, match="closed"):
        llm.generate(PROMPT)


def test_an_llm_that_is_forgotten_leaves_its_region(model: Path) -> None:
    name = f"test-llm-forgotten-{os.getpid()}"
    llm = load(model, region=name)
    assert region_path(name).exists()
    del llm
    gc.collect()
    assert not region_path(name).exists()


@pytest.mark.parametrize("end", [pytest.param("", marks=pytest.mark.long), "1 / 0"])
def test_a_process_that_does_not_close_its_llm_leaves_nothing(model: Path, end: str) -> None:
    name = f"test-llm-left-{os.getpid()}"
    options = f"load_format='dummy', tokenizer={str(default_model_path())!r}, cpu_threads=1, region={name!r}"
    code = f"from blink import LLM\nllm = LLM({str(model)!r}, {options})\nprint(len(llm.generate('a')))\n{end}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout.strip() == "1", run.stderr
    assert run.returncode == bool(end)
    assert not region_path(name).exists()
