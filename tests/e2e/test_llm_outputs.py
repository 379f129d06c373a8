# SPDX-License-Identifier: Apache-2.0
"""`LLM` and `AsyncLLM` with an engine: what vLLM's scripts call and read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, AsyncEngineArgs, AsyncLLM, BeamSearchParams, RequestOutput, RequestOutputKind, SamplingParams
from blink.errors import BadRequestError, EngineUnavailableError
from blink.models.weights.files import default_model_path
from blink.outputs import CompletionOutput
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model's tokenizer is not downloaded"),
]
PROMPT = "Some rivers of Europe are"
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 160,
    "cpu_threads": 1,
    "max_sequences_per_worker": 6,
    "scheduling_policy": "priority",
    "trust_remote_code": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), tokenizer=str(default_model_path()), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[AsyncLLM]:
    args = AsyncEngineArgs(str(model), tokenizer=str(default_model_path()), **OPTIONS)
    engine = AsyncLLM.from_engine_args(args)
    yield engine
    engine.shutdown()


def sampled(**params: Any) -> SamplingParams:
    return SamplingParams(**dict[str, Any](seed=11, max_tokens=7, ignore_eos=True) | params)


def test_logprobs_are_dicts_by_token_with_the_sampled_one_first(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, sampled(logprobs=3, prompt_logprobs=2), use_tqdm=False)
    [choice] = output.outputs
    assert choice.logprobs is not None and output.prompt_logprobs is not None
    for tokens, positions in (
        (choice.token_ids, choice.logprobs),
        (output.prompt_token_ids[1:], output.prompt_logprobs[1:]),
    ):
        for token, position in zip(tokens, positions, strict=True):
            assert position is not None and next(iter(position)) == token
            ranks = [entry.rank for entry in position.values() if entry.rank is not None]
            assert sorted(ranks) == [*range(1, len(ranks) + 1)]
            by_rank = sorted((entry.rank, entry.logprob) for entry in position.values() if entry.rank)
            assert [value for _, value in by_rank] == sorted((value for _, value in by_rank), reverse=True)
    texts = [position[token].decoded_token for token, position in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert "".join(map(str, texts)) == choice.text
    assert choice.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for token, position in zip(choice.token_ids, choice.logprobs, strict=True))
    )


def test_a_cached_prefix_is_told(llm: LLM) -> None:
    prompt = [9, 8, 7] * 20
    first, again = (llm.generate([prompt], sampled(), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert llm.reset_prefix_cache() is True
    assert llm.generate([prompt], sampled(), use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate([prompt], sampled(skip_reading_prefix_cache=True), use_tqdm=False)[0].num_cached_tokens == 0


def test_parameters_that_were_changed_are_checked_where_they_are_used(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 3
    assert len(llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids) <= 3
    params.temperature = -1.0
    with pytest.raises(BadRequestError) as caught:
        llm.generate(PROMPT, params, use_tqdm=False)
    assert caught.value.param == "temperature"


def test_what_is_enqueued_is_completed_later_in_order(llm: LLM) -> None:
    ids = llm.enqueue([PROMPT, [5, 6]], [sampled(), sampled(max_tokens=2)], priority=[3, -3])
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert outputs[0].outputs == llm.generate(PROMPT, sampled(), use_tqdm=False)[0].outputs
    assert [len(output.outputs[0].token_ids) for output in outputs] == [7, 2]
    assert llm.wait_for_completion(use_tqdm=False) == []
    with pytest.raises(BadRequestError):
        llm.generate([PROMPT] * 3, sampled(), use_tqdm=False, priority=[1])


def test_chats_are_enqueued_as_prompts_are(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Name one.", "Name two.")]
    options: dict[str, Any] = {"chat_template": "{{ messages[0].content }}", "priority": 1}
    ids = [*llm.enqueue_chat(chats, sampled(), False, **options), *llm.enqueue(PROMPT, sampled())]
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.prompt for output in outputs] == ["Name one.", "Name two.", PROMPT]
    assert outputs[1].outputs == llm.chat(chats[1], sampled(), False, **options)[0].outputs
    with pytest.raises(BadRequestError):
        llm.enqueue_chat(chats, sampled(), lora_request=object())


def test_named_tokens_have_the_logprobs_that_they_have_among_the_top_ones(llm: LLM) -> None:
    [full] = llm.generate(PROMPT, sampled(logprobs=20), use_tqdm=False)[0].outputs
    assert full.logprobs is not None
    names = sorted(full.logprobs[0].keys() - {full.token_ids[0]})[:3]
    [named] = llm.generate(PROMPT, sampled(logprob_token_ids=[*names, names[0]]), use_tqdm=False)[0].outputs
    assert named.token_ids == full.token_ids and named.logprobs is not None  # a bias of nothing changes nothing
    for token, position in zip(named.token_ids, named.logprobs, strict=True):
        assert set(position) == {token, *names} and all(position[name].rank is None for name in names)
    for name in names:
        assert named.logprobs[0][name].logprob == pytest.approx(full.logprobs[0][name].logprob, abs=1e-5)
    with pytest.raises(BadRequestError, match="not a token id"):
        llm.generate(PROMPT, sampled(logprob_token_ids=[1 << 20]), use_tqdm=False)


def test_a_chat_may_bring_its_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Name one."}]
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ mood }}"
    [output] = llm.chat(messages, sampled(), False, chat_template=template, chat_template_kwargs={"mood": "!"})
    assert output.prompt == "[user:Name one.]!"
    with pytest.raises(ValueError, match="template"):
        llm.chat(messages, sampled(), False, chat_template="{% if %}")


def test_the_engine_tells_its_sizes(llm: LLM) -> None:
    told = llm.llm_engine
    assert told.model_config.max_model_len == told.get_model_config().max_model_len == 160
    assert told.vllm_config.cache_config.block_size == 16
    assert told.model_config.get_vocab_size() == 49152
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode(PROMPT)) == PROMPT


def test_a_beam_search_finds_no_worse_than_greedy_sampling(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True, length_penalty=0.0)
    [found] = llm.beam_search([{"prompt": PROMPT}], params)
    [greedy] = llm.generate(PROMPT, sampled(temperature=0.0, max_tokens=4, logprobs=0), use_tqdm=False)
    scores = [sequence.cum_logprob for sequence in found.sequences]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    assert scores[0] >= (greedy.outputs[0].cumulative_logprob or 0.0) - 1e-4
    assert all(sequence.text is not None and sequence.text.startswith(PROMPT) for sequence in found.sequences)
    with pytest.raises(BadRequestError):
        llm.beam_search([[5] * 150], BeamSearchParams(beam_width=2, max_tokens=20))


def collect(engine: AsyncLLM, params: SamplingParams, prompt: Any = PROMPT, **options: Any) -> list[RequestOutput]:
    async def run() -> list[RequestOutput]:
        return [output async for output in engine.generate(prompt, params, "request", **options)]

    return asyncio.run(run())


def logprobs_of(parts: list[CompletionOutput]) -> dict[tuple[int, int], float]:
    """Return each logprob by position and token; how steps are composed rounds them otherwise."""
    positions = [position for part in parts for position in part.logprobs or []]
    return {(i, token): entry.logprob for i, position in enumerate(positions) for token, entry in position.items()}


def test_a_stream_grows_as_its_kind_says_and_ends_as_llm_does(llm: LLM, engine: AsyncLLM) -> None:
    [whole] = llm.generate(PROMPT, sampled(n=2, logprobs=1), use_tqdm=False)
    for kind in RequestOutputKind:
        outputs = collect(engine, sampled(n=2, logprobs=1, output_kind=kind), priority=2)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {output.request_id for output in outputs} == {"request"}
        if kind is RequestOutputKind.DELTA:
            for place, expected in enumerate(whole.outputs):
                parts = [part for output in outputs for part in output.outputs if part.index == place]
                assert "".join(part.text for part in parts) == expected.text
                assert [token for part in parts for token in part.token_ids] == list(expected.token_ids)
                assert logprobs_of(parts) == pytest.approx(logprobs_of([expected]), abs=1e-4)
                assert [part.finish_reason for part in parts if part.finished()] == ["length"]
        else:
            for found, expected in zip(outputs[-1].outputs, whole.outputs, strict=True):
                assert (found.index, found.text, found.token_ids) == (expected.index, expected.text, expected.token_ids)
                assert found.finish_reason == expected.finish_reason
                assert logprobs_of([found]) == pytest.approx(logprobs_of([expected]), abs=1e-4)
            assert len(outputs) == 1 or kind is RequestOutputKind.CUMULATIVE


def test_many_streams_share_the_engine_beyond_what_it_holds(llm: LLM, engine: AsyncLLM) -> None:
    prompts = [[100 + place, 3] for place in range(14)]

    async def last_of(place: int) -> RequestOutput:
        async for output in engine.generate({"prompt_token_ids": prompts[place]}, sampled(), f"r{place}"):
            if output.finished:
                return output
        raise AssertionError("a stream ends with its last output")

    async def run() -> list[RequestOutput]:
        return await asyncio.gather(*map(last_of, range(len(prompts))))

    found = asyncio.run(run())
    expected = llm.generate(prompts, sampled(), use_tqdm=False)
    assert [output.outputs for output in found] == [output.outputs for output in expected]


def test_an_aborted_stream_ends_with_what_it_has(engine: AsyncLLM) -> None:
    async def run() -> RequestOutput | None:
        last = None
        async for output in engine.generate(PROMPT, sampled(max_tokens=150), "long"):
            last = output
            await engine.abort("long")
        return last

    last = asyncio.run(run())
    assert last is not None and last.finished
    assert last.outputs[0].finish_reason == "abort" and 1 <= len(last.outputs[0].token_ids) < 150


def test_a_stream_that_is_left_leaves_the_engine(engine: AsyncLLM) -> None:
    async def run() -> None:
        stream = engine.generate(PROMPT, sampled(max_tokens=150), "left")
        await anext(stream)
        with pytest.raises(BadRequestError, match="running"):
            await anext(engine.generate(PROMPT, sampled(), "left"))
        await stream.aclose()
        assert len([output async for output in engine.generate(PROMPT, sampled(max_tokens=1), "left")]) == 1

    asyncio.run(run())


def test_a_stream_of_wrong_parameters_is_refused(engine: AsyncLLM) -> None:
    for prompt, params in (([], sampled()), ([5] * 200, sampled()), (PROMPT, sampled(stop_token_ids=[1 << 30]))):
        with pytest.raises(BadRequestError):
            collect(engine, params, prompt)


def test_a_closed_engine_says_so(model: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(str(model), tokenizer=str(default_model_path()), **OPTIONS) as engine:
            stream = engine.generate(PROMPT, sampled(max_tokens=150))
            await anext(stream)
        assert not engine.is_running
        with pytest.raises(EngineUnavailableError, match="closed"):
            await anext(stream)
        with pytest.raises(EngineUnavailableError, match="closed"):
            await anext(engine.generate(PROMPT, sampled()))

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [0.0, 1.0, 8.0])
def test_only_allowed_tokens_are_generated(llm: LLM, temperature: float) -> None:
    """Of a model of random weights, which prefers nothing."""
    allowed = [300, 4000, 47001]
    params = sampled(allowed_token_ids=allowed, temperature=temperature, max_tokens=40, n=4, min_tokens=40)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    found = {token for choice in output.outputs for token in choice.token_ids}
    assert found <= set(allowed) and (len(found) == 3 or temperature == 0.0)


def test_bad_words_are_not_generated(llm: LLM) -> None:
    """Words that the same request has without them: one token, a part of a word, and several tokens."""
    tokenizer = llm.get_tokenizer()
    [before] = llm.generate(PROMPT, sampled(max_tokens=60), use_tqdm=False)
    tokens = list(before.outputs[0].token_ids)
    single = next(tokenizer.decode(token) for token in tokens if len(tokenizer.decode(token).strip()) > 2)
    several = before.outputs[0].text[20:32]
    for words in ([single], [several], [single, several]):
        [after] = llm.generate(PROMPT, sampled(max_tokens=60, bad_words=words), use_tqdm=False)
        assert len(after.outputs[0].token_ids) == 60
        assert not [word for word in words if word in after.outputs[0].text]
