# SPDX-License-Identifier: Apache-2.0
"""Bodies of much work are read in a process of their own, with the same result, in time and again after its death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import orjson
import pytest
from tokenizers import Tokenizer as Backend

import fake_engine
from blink.api import reader as reader_module
from blink.api.reader import Reader
from blink.api.reading import is_light, read_body
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.config import FrontendConfig
from blink.errors import BadRequestError, BlinkError, NotFoundError, OverloadedError
from blink.request.planner import Planner
from blink.sampling_params import SamplingParams
from blink.text.assets import ModelAssets, load_assets
from blink.text.prompt import PromptRules
from blink.text.tokenizer import Tokenizer
from cpu_seconds import least_seconds
from hostile_bodies import AUDITED, Hostile, audited_body
from make_tokenizer import FOLDER, VOCAB_SIZE
from processes import children_of
from small_tokenizer import MODEL

CONFIG = FrontendConfig(model=MODEL)
ENGINE = replace(fake_engine.ENGINE, max_model_len=8192, can_constrain=False)
BOUNDS = Bounds(max_tokenize_chars=100_000, model_names=("m",), engine=ENGINE)
TEXT = "It is a truth universally acknowledged. " * 600


def len_of(hostile: Hostile) -> int:
    return len(hostile.body)


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(CONFIG)


@pytest.fixture(scope="module")
def reader(assets: ModelAssets) -> Iterator[Reader]:
    reader = Reader(CONFIG, assets)
    yield reader
    reader.close()


def children() -> set[int]:
    return set(children_of(os.getpid(), "blink.api.reader"))


def test_a_large_body_is_read_as_a_small_one_would_be(reader: Reader, assets: ModelAssets) -> None:
    bodies = {
        "completions": {"prompt": [TEXT, "b"], "echo": True, "user": "me", "temperature": 0.5},
        "chat": {"messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": "hi"}], "n": 2},
        "tokenize": {"prompt": TEXT, "return_token_strs": True},
        "detokenize": {"tokens": list(range(24, VOCAB_SIZE)) * 18},
    }

    async def read_all() -> dict[str, ParsedRequest]:
        return {kind: await reader.read(kind, bytearray(orjson.dumps(body)), BOUNDS) for kind, body in bodies.items()}

    for kind, parsed in asyncio.run(read_all()).items():
        data = orjson.dumps(bodies[kind])
        assert not is_light(data)
        expected = read_body(kind, data, assets, BOUNDS)
        assert [prompt.tolist() for prompt in parsed.prompts] == [prompt.tolist() for prompt in expected.prompts]
        assert replace(parsed, prompts=[], parsed_at=0) == replace(expected, prompts=[], parsed_at=0)
    assert len(children()) == 1


def test_prompts_of_some_thousand_tokens_need_no_other_process(assets: ModelAssets) -> None:
    reader, before = Reader(CONFIG, assets), children()
    ids = list(range(24, VOCAB_SIZE)) * 4
    light = [{"prompt": ids}, {"prompt": TEXT[:15_000]}, {"prompt": [ids, ids], "logit_bias": {"5": 1}, "stop": ["x"]}]
    heavy = [{"prompt": TEXT}, {"prompt": "a", "stop": ["a"] * 4000}, {"prompt": [ids] * 6}]

    async def read_all() -> list[int]:
        read = [await reader.read("completions", bytearray(orjson.dumps(body)), BOUNDS) for body in light]
        return [len(one.prompts[0]) for one in read]

    assert asyncio.run(read_all())[0] == len(ids)
    assert children() == before
    assert not any(is_light(orjson.dumps(body)) for body in heavy)


@pytest.mark.parametrize("name", list(AUDITED))
def test_a_body_that_is_read_at_once_takes_no_longer_than_small_ones_may(assets: ModelAssets, name: str) -> None:
    """The largest body of each hostile shape that is light; of a core's time, several times what is usual."""
    sizes = range(200, 200_000, 4000)
    hostile = max((audited_body(name, size) for size in sizes if is_light(audited_body(name, size).body)), key=len_of)
    kind = {"/v1/chat/completions": "chat"}.get(hostile.path, hostile.path.removeprefix("/v1/").removeprefix("/"))

    def read() -> None:
        with contextlib.suppress(BlinkError):
            read_body(kind, bytearray(hostile.body), assets, BOUNDS)

    assert least_seconds(read, enough=0.1) < 0.1


def test_a_refusal_comes_back_as_it_is(reader: Reader) -> None:
    async def read() -> None:
        body = {"prompt": TEXT, "echo": True, "logprobs": 1, "stream": True}
        await reader.read("completions", bytearray(orjson.dumps(body)), BOUNDS)

    with pytest.raises(BadRequestError, match="Logprobs of the prompt are not available") as caught:
        asyncio.run(read())
    assert caught.value.param == "stream"


def test_a_reader_that_dies_or_hangs_fails_one_request_and_is_replaced(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = orjson.dumps({"prompt": TEXT})

    async def stop_and_read(number: signal.Signals) -> ParsedRequest:
        await reader.read("completions", bytearray(body), BOUNDS)
        (child,) = children()
        os.kill(child, number)
        if number == signal.SIGKILL:
            with contextlib.suppress(BadRequestError):  # while it dies
                await reader.read("completions", bytearray(body), BOUNDS)
        else:
            monkeypatch.setattr(reader_module, "_READ_SECONDS", 0.5)
            started = time.monotonic()
            with pytest.raises(BadRequestError, match="too much time or memory"):
                await reader.read("completions", bytearray(body), BOUNDS)
            assert time.monotonic() - started < 20
            monkeypatch.undo()
        return await reader.read("completions", bytearray(body), BOUNDS)

    for number in (signal.SIGKILL, signal.SIGSTOP):
        assert len(asyncio.run(stop_and_read(number)).prompts[0]) > 1000


def test_small_bodies_go_before_large_ones_and_a_full_queue_is_said(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []

    async def read(size: int) -> None:
        await reader.read("completions", bytearray(orjson.dumps({"prompt": "abc " * size})), BOUNDS)
        order.append(size)

    async def read_all() -> None:
        monkeypatch.setattr(reader_module, "_MAX_WAITING", 3)
        tasks = [asyncio.create_task(read(size)) for size in (6003, 6002, 6001)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await read(6000)
        await asyncio.gather(*tasks)

    asyncio.run(read_all())
    assert order == [6001, 6002, 6003]


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("tokenize", {"prompt": "a" * 100_001}, "at most 100000"),
        ("detokenize", {"tokens": [5] * 25_001}, "at most 25000"),
        ("completions", {"prompt": "a" * 700_000}, "more than 8192"),
        ("completions", {"prompt": "a" * 1_100_000, "truncate_prompt_tokens": 5}, "at most 1048576"),
        ("completions", {"prompt": ["a"] * 65}, "at most 64 sequences"),
        ("completions", {"prompt": "a", "stop": ["a"] * 129}, "stop must be at most 128"),
        ("completions", {"prompt": "a", "user": [[]] * 70_000}, "holds too much"),
        ("completions", {"prompt": "a", "user": [1] * 1_100_000}, "holds too much"),
        ("completions", {"prompt": [2**64 - 1]}, "out of vocabulary"),
        ("completions", {"prompt": [5, -1, 6]}, "Token id -1 is out of vocabulary"),
        ("completions", {"prompt": [5, ENGINE.vocab_size]}, f"Token id {ENGINE.vocab_size} is out of vocabulary"),
    ],
)
def test_what_is_too_much_is_refused_before_the_work(
    assets: ModelAssets, kind: str, body: dict[str, object], words: str
) -> None:
    with pytest.raises(BadRequestError, match=words):
        read_body(kind, orjson.dumps(body), assets, BOUNDS)


def test_what_only_looks_like_much_is_taken(assets: ModelAssets) -> None:
    body = orjson.dumps({"prompt": '[,{"\\' * 1000, "user": "[" * 100_000})
    assert len(read_body("completions", body, assets, BOUNDS).prompts) == 1


@pytest.mark.parametrize(("name", "is_served"), [("m", True), ("second", True), ("", True), ("third", False)])
def test_a_model_answers_to_each_of_its_names(assets: ModelAssets, name: str, is_served: bool) -> None:
    body, bounds = orjson.dumps({"prompt": "abc", "model": name}), replace(BOUNDS, model_names=("m", "second"))
    if is_served:
        assert read_body("completions", body, assets, bounds).prompts
    else:
        with pytest.raises(NotFoundError, match="`third` does not exist"):
            read_body("completions", body, assets, bounds)


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_server_may_say_for_all_requests_what_answers_hold(
    assets: ModelAssets, kind: str, options: dict[str, bool] | None
) -> None:
    fields = {"completions": {"prompt": "abc"}, "chat": {"messages": [{"role": "user", "content": "abc"}]}}[kind]
    body = orjson.dumps({**fields, "stream": True, "stream_options": options})
    plain = read_body(kind, body, assets, BOUNDS).reply
    asked = read_body(kind, body, assets, replace(BOUNDS, names_token_ids=True, always_has_usage=True)).reply
    assert (plain.include_usage, plain.names_token_ids) == (False, False)  # pyright: ignore
    assert (asked.include_usage, asked.names_token_ids) == (True, True)  # pyright: ignore
    assert (plain.continuous_usage, asked.continuous_usage) == (False, True)  # pyright: ignore


def test_without_an_engine_fields_are_checked_and_nothing_is_tokenized(assets: ModelAssets) -> None:
    bounds = replace(BOUNDS, engine=None)
    assert not read_body("completions", orjson.dumps({"prompt": TEXT}), assets, bounds).has_engine
    with pytest.raises(BadRequestError):
        read_body("completions", b'{"prompt": 3}', assets, bounds)


@pytest.mark.parametrize(
    ("fields", "param"),
    [('"logit_bias":{"5":NaN}', "logit_bias"), (f'"logit_bias":{{"{"9" * 5000}":1}}', "logit_bias")],
)
def test_a_bias_that_is_none_is_400_by_name(assets: ModelAssets, fields: str, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_body("completions", f'{{"prompt":"a",{fields}}}'.encode(), assets, BOUNDS)
    assert caught.value.param == param


def test_tokens_that_another_server_made_are_the_prompt_of_a_chat(assets: ModelAssets) -> None:
    def read(kind: str, given: object) -> ParsedRequest:
        prompt = {"messages": [{"role": "user", "content": "Hi."}]} if kind == "chat" else {"prompt": "Hi."}
        return read_body(kind, orjson.dumps({**prompt, "kv_transfer_params": given}), assets, BOUNDS)

    (prompt,) = read("chat", {"prompt_token_ids": [5, 6, 7]}).prompts
    assert prompt.tolist() == [5, 6, 7]
    wrong = [{"prompt_token_ids": []}, {"prompt_token_ids": [VOCAB_SIZE]}, {"prompt_token_ids": [5], "remote": "x"}, {}]
    for kind, given in (*(("chat", given) for given in wrong), ("completions", {"prompt_token_ids": [5]})):
        with pytest.raises(BadRequestError):
            read(kind, given)


@pytest.fixture(scope="module")
def more_tokens(assets: ModelAssets) -> ModelAssets:
    """Assets whose tokenizer has a token more than the model."""
    backend = Backend.from_file(str(FOLDER / "tokenizer.json"))
    backend.add_special_tokens(["<extra>"])
    return replace(assets, tokenizer=Tokenizer(backend))


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("completions", {"prompt": "a <extra> b"}, "prompt"),
        ("completions", {"prompt": ["a", "b", "<extra>"], "echo": True}, "prompt"),
        ("completions", {"prompt": [[1], [2, VOCAB_SIZE]]}, "prompt"),
        ("chat", {"messages": [{"role": "user", "content": "<extra>"}]}, "messages"),
        ("responses", {"input": "<extra>"}, "input"),
        ("responses", {"input": "hi", "instructions": "Say <extra>."}, "input"),
    ],
)
def test_tokens_that_the_model_has_no_row_for_are_refused_by_name(
    more_tokens: ModelAssets, kind: str, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(BadRequestError, match=str(VOCAB_SIZE)) as caught:
        read_body(kind, orjson.dumps(fields), more_tokens, BOUNDS)
    assert caught.value.param == param


@pytest.mark.parametrize("param", ["prompt", "messages"])
def test_a_planner_refuses_them_too(more_tokens: ModelAssets, param: str) -> None:
    rules = PromptRules(add_special_tokens=False, param=param)
    with pytest.raises(BadRequestError, match=f"'<extra>' is token {VOCAB_SIZE}") as caught:
        Planner(more_tokens).plan_now(["fine", "not <extra>"], SamplingParams(), rules, ENGINE)
    assert caught.value.param == param
