# SPDX-License-Identifier: Apache-2.0
"""The GPU engine with and without speculation: tokens, logprobs and ends are equal, whatever was drafted."""

from __future__ import annotations

import functools
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_constrained_engine import BYTES
from test_engine import connect
from tokenizers import Tokenizer, decoders, models

from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.link.client import EngineClient
from blink.region.layout import CqeKind
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from tiny_model import CONFIG, write_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 1024}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
SPECULATIVE = json.dumps({"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1})
FEW_TOKENS = dict.fromkeys((40, 41, 42, 43, 60, 61), 40.0)  # texts of few tokens repeat themselves
ITEM = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "blue"]}, "size": {"enum": [1, 2]}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ITEM, "minItems": 6, "maxItems": 6}
TEMPERATURES = (0.0, 0.8)
NUM_TOKENS = 120


@dataclass
class Answer:
    """What a sequence was given."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    end: int = 0


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[Callable[[], EngineClient]]:
    """Run an engine; yield, when it is ready, what connects to it. A client that is silent for long loses its lease."""
    region = f"gpu-{os.getpid()}-{secrets.token_hex(3)}"
    usual = [f"--model={model}", "--load-format=dummy", "--device=cuda", f"--region={region}", "--max-num-seqs=8"]
    usual += ["--num-gpu-blocks-override=1024", "--max-num-batched-tokens=64", *flags]
    process = subprocess.Popen([sys.executable, "-m", "blink", "engine", *usual])
    try:
        connect(region, process).close()
        yield functools.partial(connect, region, process)
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()


def ask(client: EngineClient, requests: Sequence[dict[str, Any]]) -> list[Answer]:
    """Let requests run at once."""
    answers = {client.submit(**request): Answer() for request in requests}
    deadline, next_tick = time.monotonic() + 60, 0.0
    while not all(answer.end for answer in answers.values()):
        assert time.monotonic() < deadline
        if time.monotonic() >= next_tick:
            next_tick = time.monotonic() + 0.25
            assert client.tick() is None
        for completion in client.drain():
            answer = answers[int(completion["sequence"])]
            if completion["kind"] == CqeKind.TOKEN:
                answer.tokens.append(int(completion["token"]))
                answer.logprobs.append(float(completion["logprob"]))
            answer.end = answer.end or int(completion["finish_reason"])
        time.sleep(0.0005)
    return [*answers.values()]


def make_request(
    number: int,
    temperature: float,
    *,
    prediction: Sequence[int] = (),
    automaton: Automaton | None = None,
    **params: Any,
) -> dict[str, Any]:
    prompt = np.asarray([(number * 17 + i * 5) % 200 + 20 for i in range(12 + number)], np.int32)
    chosen: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logprobs": 0, "ignore_eos": True, "logit_bias": FEW_TOKENS}
    if automaton is not None:
        del chosen["logit_bias"]
    sampling = SamplingParams(temperature=temperature, **(chosen | params))
    asked = {"prompt": prompt, "params": sampling, "seed": 5 + number, "automaton": automaton}
    return asked | {"prediction": np.asarray(prediction, np.int32)}


def same(found: Sequence[Answer], expected: Sequence[Answer], *, logprobs: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.end) == (other.tokens, other.end)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=logprobs)


def write_model(folder: Path) -> Path:
    write_tiny_model(folder, **SIZES)
    assert set(SIZES) - {"head_dim"} <= set(CONFIG)
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(BYTES)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["one GPU", "two GPUs"])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineClient, EngineClient]]:
    """The same model in float32: on one GPU without speculation, on one or two with it."""
    if torch.cuda.device_count() < request.param:
        pytest.skip("needs two GPUs")
    model = write_model(tmp_path_factory.mktemp("model"))
    flags = f"--speculative-config={SPECULATIVE}", f"--tensor-parallel-size={request.param}"
    with serving(model, "--dtype=float32") as plain, serving(model, "--dtype=float32", *flags) as drafting:
        clients = plain(), drafting()
        yield clients
        for client in clients:
            client.close()


PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "penalties": PENALTIES, "top logprobs": {"logprobs": 4}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_tokens_and_logprobs_are_those_without_drafts(
    engines: tuple[EngineClient, EngineClient], temperature: float, kind: str
) -> None:
    """Together and alone: costs decide on drafts, and a step of one row is the likeliest to have some."""
    plain, drafting = engines
    requests = [make_request(number, temperature, **KINDS[kind]) for number in range(4)]
    expected = ask(plain, requests)
    before = drafting.stats()["draft_tokens"]
    same(ask(drafting, requests), expected, logprobs=1e-3)
    predicted = make_request(0, temperature, prediction=expected[0].tokens, **KINDS[kind])
    same(ask(drafting, [predicted]), expected[:1], logprobs=1e-3)
    assert drafting.stats()["draft_tokens"] > before and plain.stats()["draft_tokens"] == 0


def steps_of(client: EngineClient, request: dict[str, Any]) -> tuple[Answer, int]:
    before = client.stats()["num_steps"]
    [answer] = ask(client, [request])
    return answer, client.stats()["num_steps"] - before


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_true_prediction_saves_steps_and_a_false_one_changes_nothing(
    engines: tuple[EngineClient, EngineClient], temperature: float
) -> None:
    plain, drafting = engines
    expected, steps = steps_of(plain, make_request(7, temperature, logit_bias=None))
    lies = [token if at % 3 else (token + 1) % 1000 for at, token in enumerate(expected.tokens)]
    for prediction, fewest in ((expected.tokens, 2), (lies, 1)):
        request = make_request(7, temperature, prediction=prediction, logit_bias=None)
        found, taken = steps_of(drafting, request)
        same([found], [expected], logprobs=1e-3)
        assert taken * fewest <= steps + 3


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_form_is_kept_with_drafts(engines: tuple[EngineClient, EngineClient], temperature: float) -> None:
    """Items of a list have most of their text in common."""
    plain, drafting = engines
    form = compile_structured(StructuredOutputsParams(json=LIST, disable_any_whitespace=True))
    requests = [make_request(number, temperature, automaton=form, max_tokens=400) for number in range(3)]
    expected = ask(plain, requests)
    before = drafting.stats()["accepted_tokens"]
    same(ask(drafting, requests), expected, logprobs=1e-3)
    for answer in expected:
        text = decoders.ByteLevel().decode([BYTES[token] for token in answer.tokens])
        assert len(json.loads(text)) == 6
    assert drafting.stats()["accepted_tokens"] > before + 50


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_what_a_form_forces_is_drafted_though_it_never_stood_before(
    engines: tuple[EngineClient, EngineClient], temperature: float
) -> None:
    """Tokens are bytes here, so nothing but the verb is a choice."""
    plain, drafting = engines
    form = compile_structured(StructuredOutputsParams(regex=r'\{"the quick brown fox": "(jumps|over) a lazy dog"\}'))
    request = make_request(9, temperature, automaton=form, max_tokens=100)
    expected, steps = steps_of(plain, request)
    found, taken = steps_of(drafting, request)
    same([found], [expected], logprobs=1e-3)
    assert taken < steps // 2


@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_drafts_of_the_decode_kernels_are_accepted(kv_cache: str, tmp_path: Path) -> None:
    """In bf16, whose kernels write and read the cache in one launch.

    Steps of other sizes round otherwise, so tokens may come to differ: each answer here is predicted from the one
    before, until a prediction is nearly always right.
    """
    flags = (f"--speculative-config={SPECULATIVE}", f"--kv-cache-dtype={kv_cache}")
    with serving(write_model(tmp_path), *flags) as connected:
        client = connected()
        [answer] = ask(client, [make_request(3, 0.0)])
        for _ in range(4):
            [answer] = ask(client, [make_request(3, 0.0, prediction=answer.tokens)])
        before = client.stats()
        ask(client, [make_request(3, 0.0, prediction=answer.tokens)])
        after = client.stats()
        client.close()
        accepted, drafted = (after[name] - before[name] for name in ("accepted_tokens", "draft_tokens"))
        assert accepted > 0.9 * drafted > 30
