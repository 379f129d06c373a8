# SPDX-License-Identifier: Apache-2.0
"""What `blink bench` sends: seeded Poisson arrivals, lengths with the means asked for, prompts of those lengths."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blink.bench.arrivals import draw_arrivals
from blink.bench.chats import CHAT_KINDS
from blink.bench.config import BenchConfig, LoadConfig, ServerConfig
from blink.bench.lengths import LONGEST_INPUT, Lengths, draw_lengths, fit
from blink.bench.record import PlannedRequest
from blink.bench.workload import Workload
from blink.errors import ConfigError


class FakeTarget:
    """A server's answers: it tokenizes by words."""

    model = "m"
    max_model_len = 600

    def __init__(self, tokenizes: bool = True) -> None:
        self._tokenizes = tokenizes

    def request_head(self, body_bytes: int, *, is_chat: bool = False) -> bytes:
        path = b"/chat" if is_chat else b"/"
        return b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (path, body_bytes)

    def tokenize(self, text: str) -> list[int] | None:
        return [1000 + len(word) for word in text.split()] if self._tokenizes else None


def _workload(load: LoadConfig, target: Any = None, **server: Any) -> Workload:
    answers: Any = target or FakeTarget()
    return Workload(BenchConfig(load=load, server=ServerConfig(**server)), answers)


def _body(request: PlannedRequest) -> dict[str, Any]:
    head, _, body = request.data.partition(b"\r\n\r\n")
    assert int(head.rpartition(b" ")[2]) == len(body)
    return json.loads(body)


def _rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_gaps_between_arrivals_are_exponential_with_the_mean_of_the_rate() -> None:
    gaps = np.diff(draw_arrivals(16, 0, 20000, _rng()))
    assert gaps.mean() == pytest.approx(1 / 16, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 16, rel=0.03)  # mean and deviation are equal in a Poisson process
    assert gaps.min() >= 0


def test_arrivals_fill_the_duration() -> None:
    times = draw_arrivals(50, 100, 0, _rng())
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 100
    assert times == draw_arrivals(50, 100, 0, _rng())


def test_infinite_rate_sends_all_at_once() -> None:
    assert draw_arrivals(math.inf, 0, 5, _rng()) == [0.0] * 5


def test_lengths_have_the_means_asked_for_although_they_are_clipped() -> None:
    drawn = draw_lengths(LoadConfig(), 50000, _rng())
    inputs, outputs = [one.input_len for one in drawn], [one.output_len for one in drawn]
    assert np.mean(inputs) == pytest.approx(185, rel=0.02)
    assert np.mean(outputs) == pytest.approx(215, rel=0.02)
    assert (min(inputs), max(inputs)) == (4, LONGEST_INPUT)
    assert np.median(inputs) < 150  # skewed, as conversations are
    assert drawn == draw_lengths(LoadConfig(), 50000, _rng())


@pytest.mark.parametrize(("mean_in", "mean_out"), [(1, 1), (20, 3), (2000, 900)])
def test_other_means_are_met_too(mean_in: int, mean_out: int) -> None:
    drawn = draw_lengths(LoadConfig(mean_input_len=mean_in, mean_output_len=mean_out), 50000, _rng())
    assert np.mean([one.input_len for one in drawn]) == pytest.approx(mean_in, rel=0.05)
    assert np.mean([one.output_len for one in drawn]) == pytest.approx(mean_out, rel=0.05)


def test_lengths_are_cut_to_the_model_and_fixed_ones_go_first() -> None:
    load = LoadConfig()
    assert fit(Lengths(100, 100), load, 0) == Lengths(100, 100)
    assert fit(Lengths(100, 100), load, 150) == Lengths(75, 75)
    assert fit(Lengths(10, 500), load, 150) == Lengths(10, 140)
    assert fit(Lengths(500, 10), load, 150) == Lengths(140, 10)
    assert fit(Lengths(500, 10), LoadConfig(input_len=7, output_len=9), 150) == Lengths(7, 9)


def test_requests_ask_for_what_was_planned() -> None:
    load = LoadConfig(request_rate="20,40", duration=5, vocab_size=5000)
    planned = _workload(load, extra_body='{"priority": 3}').plan(1, 0)
    assert len(planned) == pytest.approx(200, rel=0.3)
    for request in planned:
        body = _body(request)
        assert len(body["prompt"]) == request.input_len
        assert max(body["prompt"]) < 5000
        assert body["max_tokens"] == request.output_len
        assert request.input_len + request.output_len <= FakeTarget.max_model_len
        assert (body["model"], body["temperature"], body["ignore_eos"], body["priority"]) == ("m", 0, True, 3)
        assert body["stream_options"] == {"include_usage": True}


def test_interference_meets_the_same_load_with_other_prompts() -> None:
    load = LoadConfig(request_rate="10", num_prompts=20)
    first, again = _workload(load).plan(0, 0), _workload(load).plan(0, 0)
    assert first == again
    other = _workload(load).plan(0, 1)
    assert [(one.at, one.input_len, one.output_len) for one in other] == [
        (one.at, one.input_len, one.output_len) for one in first
    ]
    assert all(_body(a)["prompt"][:8] != _body(b)["prompt"][:8] for a, b in zip(first, other, strict=True))


def test_a_second_load_rides_beside_each_rate_in_a_class_of_its_own() -> None:
    load = LoadConfig(request_rate="20,40", duration=20, input_len=7, flex_request_rate=50, flex_output_len=5)
    flex = [[one for one in _workload(load).plan(index, 0) if one.request_class == "flex"] for index in range(2)]
    both = _workload(load).plan(0, 0)
    assert sorted(one.index for one in both) == list(range(len(both)))
    assert [one.at for one in both] == sorted(one.at for one in both)
    assert len(flex[0]) == pytest.approx(1000, rel=0.1) == len(flex[1])
    urgent = [one for one in both if one.request_class == "default"]
    alone = _workload(replace(load, flex_request_rate=0)).plan(0, 0)
    assert [(one.at, one.output_len) for one in urgent] == [(one.at, one.output_len) for one in alone]
    assert {one.input_len for one in urgent} == {7} != {one.input_len for one in flex[0]}
    assert {one.output_len for one in flex[0]} == {5}
    assert {_body(one).get("service_tier") for one in urgent} == {None}
    assert {_body(one)["service_tier"] for one in flex[0]} == {"flex"}
    one_class = _workload(replace(load, flex_service_tier="default")).plan(0, 0)
    tiers = [_body(one).get("service_tier") for one in one_class if one.request_class == "flex"]
    assert set(tiers) == {"default"} and len(tiers) == len(flex[0])


def test_text_prompts_have_as_many_words() -> None:
    load = LoadConfig(prompt_format="text", num_prompts=3, dataset_name="random", random_input_len=11)
    for request in _workload(load).plan(0, 0):
        assert len(_body(request)["prompt"].split()) == 11


def test_sharegpt_gives_texts_and_lengths_that_fit(tmp_path: Path) -> None:
    def entry(*lengths: int) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": "w " * length} for length in lengths]}

    path = tmp_path / "sharegpt.json"
    # Too short, too long a prompt, too long for the model, no answer; the last two are good.
    path.write_text(json.dumps([entry(2, 50), entry(1025, 50), entry(300, 301), entry(9), entry(6, 8), entry(20, 30)]))
    load = LoadConfig(dataset_name="sharegpt", dataset_path=str(path), num_prompts=5)
    planned = _workload(load).plan(0, 0)
    assert {(one.input_len, one.output_len) for one in planned} == {(6, 8), (20, 30)}
    assert all(len(_body(one)["prompt"]) == one.input_len for one in planned)
    guessed = _workload(load, FakeTarget(tokenizes=False))
    assert guessed.guesses_lengths
    assert all(isinstance(_body(one)["prompt"], str) for one in guessed.plan(0, 0))


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '[{"conversations": [{"value": "a"}, {}]}]', "[]"])
def test_file_that_is_not_of_sharegpt_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--dataset-path"):
        _workload(LoadConfig(dataset_name="sharegpt", dataset_path=str(path), num_prompts=1))


@pytest.mark.parametrize("rate", ["", "x", "0", "-1", "1,,2", "inf", "nan"])
def test_wrong_rates_are_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match="--request-rate"):
        _ = LoadConfig(request_rate=rate).rates


@pytest.mark.parametrize("kind", CHAT_KINDS)
def test_chats_of_a_kind_are_sent_in_turn_and_end_where_the_model_ends_them(kind: str) -> None:
    load = LoadConfig(request_rate="inf", num_prompts=20, dataset_name=kind, temperature=0.5, max_model_len=2000)
    planned = _workload(load).plan(0, 0)
    bodies = [_body(request) for request in planned]
    number = len({json.dumps(body) for body in bodies})
    assert 4 <= number < 20 and bodies[number] == bodies[0]
    assert all(request.data.startswith(b"POST /chat ") for request in planned)
    for body in bodies:
        assert body["stream"] and body["temperature"] == 0.5 and body["max_tokens"] == 256
        assert "ignore_eos" not in body and "prompt" not in body
        assert ("prediction" in body) is (kind == "edit") and ("response_format" in body) is (kind == "json")
        asked = body["messages"][0]["content"]
        assert kind != "edit" or body["prediction"]["content"] in asked


def test_chats_are_warmed_up_with_prompts() -> None:
    [request, *_] = _workload(LoadConfig(dataset_name="json")).plan_warmups()
    assert request.data.startswith(b"POST / ") and "prompt" in _body(request)
