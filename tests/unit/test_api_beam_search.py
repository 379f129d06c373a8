# SPDX-License-Identifier: Apache-2.0
"""Beam search over HTTP, in front of an engine whose next tokens depend on the last one alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blink.beam_search_params import BeamSearchParams
from blink.config import FrontendConfig
from blink.errors import EngineUnavailableError, OverloadedError
from blink.region.layout import CqeKind, FinishReason
from blink.request.beam_search import Beam, run_steps, search
from blink.text.assets import ModelAssets, load_assets
from blink.text.generation import TokenLogprob
from fake_engine import ENGINE, FakeEngine, FakeServer
from small_tokenizer import MODEL

CONFIG = FrontendConfig(model=MODEL, region="test-beam-search")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "use_beam_search": True, "n": 3, "max_tokens": 6}
MESSAGES = [{"role": "user", "content": "Hi there"}]
TOKENS = range(20, 60)


def likely_behind(token: int, eos: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens in the place behind one, the likeliest first."""
    rng = np.random.default_rng(token)
    tokens = [*rng.choice(TOKENS, 19, replace=False).tolist(), eos]
    return sorted(zip(tokens, (-3 * rng.random(20)).tolist(), strict=True), key=lambda entry: -entry[1])


class MarkovEngine(FakeEngine):
    """Answers each sequence with its likeliest next token, and with as many others as are asked for."""

    def __init__(self, eos: int) -> None:
        super().__init__()
        self.eos = eos
        self.before: Callable[[], object] = lambda: None  # is called before each step

    def submit(self, prompt: Any, params: Any, **options: Any) -> int:
        self.before()
        return super().submit(prompt, params, **options)

    def answer(self, sequence: int) -> Iterator[dict[str, Any]]:
        asked = self.submitted[sequence - 1]
        likely = likely_behind(int(asked.prompt[-1]), self.eos)
        yield {"kind": CqeKind.ADMITTED, "sequence": sequence, "token": len(asked.prompt) - 1}
        for token, logprob in likely[: asked.params.logprobs]:
            yield {"kind": CqeKind.TOP_LOGPROB, "sequence": sequence, "token": token, "logprob": logprob}
        token, logprob = likely[0]
        end = {"finish_reason": FinishReason.LENGTH}
        yield {"kind": CqeKind.TOKEN, "sequence": sequence, "token": token, "logprob": logprob} | end


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(CONFIG)


@pytest.fixture
def server(assets: ModelAssets, tmp_path: Path) -> Iterator[FakeServer]:
    server = FakeServer(CONFIG, assets, tmp_path, MarkovEngine(assets.eos_token_ids[0]))
    yield server
    server.close()


@pytest.fixture(scope="module")
def idle(assets: ModelAssets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """A server that all share who ask its engine for nothing."""
    server = FakeServer(CONFIG, assets, tmp_path_factory.mktemp("idle"))
    yield server
    server.close()


def find(prompt: list[int], assets: ModelAssets, **options: Any) -> list[Beam]:
    """Return what a search in this thread finds."""

    def score(sequences: Any) -> list[TokenLogprob]:
        tops = [likely_behind(int(tokens[-1]), assets.eos_token_ids[0]) for tokens in sequences]
        return [TokenLogprob(*top[0], top) for top in tops]

    params = BeamSearchParams(**dict[str, Any](beam_width=3, max_tokens=6) | options)
    [beams] = run_steps(search([np.array(prompt, np.int32)], params, assets.eos_token_ids), score)
    return beams


def tokens_of(beam: Beam) -> list[int]:
    return [entry.token for entry in beam.logprobs]


@pytest.mark.parametrize("options", [{}, {"length_penalty": 0.0}, {"early_stopping": True}, {"ignore_eos": True}])
def test_a_completion_has_the_sequences_that_the_search_finds(
    server: FakeServer, assets: ModelAssets, options: dict[str, Any]
) -> None:
    response = server.post(COMPLETIONS, BODY | options | {"return_token_ids": True, "logprobs": 2})
    assert response.status_code == 200, response.text
    body, beams = response.json(), find([5, 6, 7], assets, **options)
    assert [choice["token_ids"] for choice in body["choices"]] == [tokens_of(beam) for beam in beams]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for choice, beam in zip(body["choices"], beams, strict=True):
        assert choice["finish_reason"] == ("length" if beam.end is None else "stop")
        shown = tokens_of(beam)[: -1 if beam.end is not None else None]
        assert choice["text"] == assets.tokenizer.decode(shown, skip_special_tokens=True)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx([entry.logprob for entry in beam.logprobs])
        assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert body["usage"]["completion_tokens"] == sum(len(beam.logprobs) for beam in beams)


def test_prompts_are_searched_together_and_kept_apart(server: FakeServer, assets: ModelAssets) -> None:
    prompts = [[5, 6, 7], [8, 9], [10]]
    body = server.post(COMPLETIONS, BODY | {"prompt": prompts, "return_token_ids": True}).json()
    expected = [tokens_of(beam) for prompt in prompts for beam in find(prompt, assets)]
    assert [choice["token_ids"] for choice in body["choices"]] == expected
    assert len(server.engine.submitted) <= 3 * 6 * 3  # one sequence for each beam and token, and no more
    assert all(each.params.max_tokens == 1 for each in server.engine.submitted)


def test_best_of_beams_n_are_shown(server: FakeServer, assets: ModelAssets) -> None:
    body = server.post(COMPLETIONS, BODY | {"n": 2, "best_of": 5, "return_token_ids": True}).json()
    expected = [tokens_of(beam) for beam in find([5, 6, 7], assets, beam_width=5)[:2]]
    assert [choice["token_ids"] for choice in body["choices"]] == expected


def test_a_chat_is_searched_too_up_to_its_context(assets: ModelAssets, tmp_path: Path) -> None:
    engine = MarkovEngine(assets.eos_token_ids[0])
    engine.info = replace(ENGINE, max_model_len=40)
    server = FakeServer(CONFIG, assets, tmp_path, engine)
    body = {"messages": MESSAGES, "use_beam_search": True, "n": 2, "logprobs": True, "ignore_eos": True}
    answer = server.post(CHAT, body).json()
    server.close()
    prompt = engine.submitted[0].prompt.tolist()
    beams = find(prompt, assets, beam_width=2, max_tokens=40 - len(prompt), ignore_eos=True)
    contents = [assets.tokenizer.decode(tokens_of(beam), skip_special_tokens=True) for beam in beams]
    assert [choice["message"]["content"] for choice in answer["choices"]] == contents
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 2 * (40 - len(prompt))


def test_steps_have_the_class_and_the_salt_of_their_request(server: FakeServer) -> None:
    fields = {"service_tier": "flex", "tpot_target_ms": 7, "max_tokens": 2}
    for salt in ("a", "b"):
        assert server.post(COMPLETIONS, BODY | fields | {"cache_salt": salt}).status_code == 200
    submitted = server.engine.submitted
    assert {(each.params.best_effort, each.params.tpot_target_ms) for each in submitted} == {(True, 7)}
    assert len({each.origin.hash_root for each in submitted}) == 2
    assert len({each.flow for each in submitted}) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 11}, "beam_width"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"stop": ["x"]}, "stop"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": [[5]] * 30}, "n"),
        ({"use_beam_search": False, "best_of": 5}, "best_of"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_a_search_does_not_do_is_refused_by_name(idle: FakeServer, fields: dict[str, Any], param: str) -> None:
    response = idle.post(COMPLETIONS, BODY | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert idle.engine.submitted == []


def test_fields_that_ask_for_nothing_do_not_hinder_a_search(server: FakeServer) -> None:
    nothing = {"stop": [], "stop_token_ids": [], "logit_bias": {}, "min_tokens": 0, "presence_penalty": 0}
    chance = {"temperature": 0.3, "top_p": 0.5, "seed": 3, "early_stopping": "never", "echo": True}
    assert server.post(COMPLETIONS, BODY | nothing | chance).status_code == 200


def test_a_forced_call_is_refused(server: FakeServer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": MESSAGES, "use_beam_search": True, "tools": tools, "tool_choice": "required"}
    assert server.post(CHAT, body).json()["error"]["param"] == "tool_choice"


def test_a_server_without_a_prefix_cache_does_not_search(assets: ModelAssets, tmp_path: Path) -> None:
    engine = MarkovEngine(assets.eos_token_ids[0])
    engine.info = replace(ENGINE, prefix_caching=False)
    server = FakeServer(CONFIG, assets, tmp_path, engine)
    response = server.post(COMPLETIONS, BODY)
    server.close()
    assert (response.status_code, response.json()["error"]["param"]) == (400, "use_beam_search")


@pytest.mark.parametrize("error", [OverloadedError("Full."), EngineUnavailableError("Gone.")])
def test_a_step_that_the_engine_does_not_take_ends_the_request(server: FakeServer, error: Any) -> None:
    def refuse_later() -> None:
        server.engine.refusal = error if len(server.engine.submitted) > 4 else None

    assert isinstance(server.engine, MarkovEngine)
    server.engine.before = refuse_later
    response = server.post(COMPLETIONS, BODY)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert server.service.poller.table.num_open == 0
    server.engine.before = lambda: setattr(server.engine, "refusal", None)
    assert server.post(COMPLETIONS, BODY).status_code == 200


def test_a_client_that_leaves_ends_its_search(server: FakeServer) -> None:
    async def leave() -> int:
        server.engine.is_silent = True
        response = asyncio.create_task(server.send_soon("POST", COMPLETIONS, json=BODY))
        while server.writer.leave is None or not server.engine.submitted:
            await asyncio.sleep(0.001)
        server.writer.leave()
        return (await response).status_code

    assert asyncio.run(leave()) == 499
    assert server.engine.cancelled == [1]
    assert server.service.poller.table.num_open == 0


def test_a_search_has_the_room_of_its_beams(assets: ModelAssets, tmp_path: Path) -> None:
    config = replace(CONFIG, max_client_share=4 / ENGINE.max_sequences)

    async def ask_twice(server: FakeServer) -> list[int]:
        bodies = [BODY, BODY]
        asked = [asyncio.create_task(server.send_soon("POST", COMPLETIONS, json=body)) for body in bodies]
        return sorted([(await each).status_code for each in asked])

    server = FakeServer(config, assets, tmp_path, MarkovEngine(assets.eos_token_ids[0]))
    assert server.post(COMPLETIONS, BODY | {"n": 5}).json()["error"]["param"] == "n"
    assert asyncio.run(ask_twice(server)) == [200, 429]
    assert server.post(COMPLETIONS, BODY).status_code == 200
    server.close()
