# SPDX-License-Identifier: Apache-2.0
"""The GPU engine with a draft head: the same answers whatever it says, in fewer steps where it knows the text."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import test_decode_kernels

from blink import LLM, SamplingParams
from blink.kernels.batch import Batch
from blink.models.weights.eagle_loader import load_eagle
from blink.plan.execution_plan import NormStyle
from blink.plan.site import Bucket
from blink.request.source import TokensPrompt
from blink.runner.eagle import EagleDrafter
from blink.runner.run import Runner
from eagle_heads import draw_head, write_clockwork, write_head
from engine_process import CONFIG, connect, count_tokens, run_engine_process, stopped
from free_drafts import load_without_costs
from model_driver import Driver, load_decoder
from step_plans import plan_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]
VOCAB, LENGTH, GUESSES = 2048, 96, 3
PROMPT = [300 + 7 * at for at in range(40)]
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512}
OPTIONS |= {"num_gpu_blocks_override": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 128}
TEMPERATURES = (0.0, 0.8)


def config_of(head: Path) -> str:
    return json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": GUESSES})


@pytest.fixture(scope="module")
def clockwork(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_clockwork(tmp_path_factory.mktemp("clockwork"), VOCAB, range(VOCAB))


def ask(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    found = llm.generate(asked, SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params), use_tqdm=False)
    return [[*each.outputs[0].token_ids] for each in found]


def play(model: Path, prompts: list[list[int]], head: Path | None = None, **options: Any) -> tuple[Any, dict[str, int]]:
    """Return the answers at each temperature, twice, and what an engine counts meanwhile."""
    more = {} if head is None else {"speculative_config": config_of(head)}
    with load_without_costs(str(model), **OPTIONS, **options, **more) as llm:
        found = [ask(llm, prompts, temperature=each, seed=3) for each in (*TEMPERATURES, *TEMPERATURES)]
        names = ("num_steps", "num_drafts", "draft_tokens", "accepted_tokens", "prefix_hits")
        return found, {name: int(llm.stats()[name]) for name in names}


@functools.cache
def play_alone(model: Path, kv_cache_dtype: str = "auto") -> tuple[Any, dict[str, int]]:
    """Return the answers to the usual prompt without a head."""
    return play(model, [PROMPT], kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_head_that_knows_the_text_takes_less_than_half_of_the_steps(
    clockwork: tuple[Path, Path], kv_cache_dtype: str
) -> None:
    model, head = clockwork
    expected, plain = play_alone(model, kv_cache_dtype)
    found, counts = play(model, [PROMPT], head, kv_cache_dtype=kv_cache_dtype)
    assert found == expected and len({*found[0][0]}) > 90
    assert counts["accepted_tokens"] > 4 * 66 and 2 * counts["num_steps"] < plain["num_steps"]


def test_many_sequences_chunks_and_cached_prefixes_are_drafted_for(clockwork: tuple[Path, Path]) -> None:
    """Some prompts take several steps; those of the second round are cached, and drafts go on from them."""
    model, head = clockwork
    prompts = [PROMPT[at:] * (1 + at % 9) for at in range(12)]
    expected, _ = play(model, prompts)
    found, counts = play(model, prompts, head)
    assert found == expected
    assert counts["accepted_tokens"] > 4 * 300 and counts["prefix_hits"] > 1000


@pytest.mark.parametrize("is_random", [True, False])
def test_a_wrong_head_changes_nothing(clockwork: tuple[Path, Path], tmp_path: Path, is_random: bool) -> None:
    """Random weights; and zeros."""
    tensors = draw_head(VOCAB, range(VOCAB), seed=9)
    if not is_random:
        tensors |= {name: 0 * tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    head = write_head(tmp_path / "head", tensors, (0, 1, 1))
    found, counts = play(clockwork[0], [PROMPT], head)
    assert found == play_alone(clockwork[0])[0] and counts["num_drafts"] > 0


def test_steps_of_prompt_logprobs_are_read_too(clockwork: tuple[Path, Path]) -> None:
    model, head = clockwork
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, prompt_logprobs=1)
    with load_without_costs(str(model), **OPTIONS, speculative_config=config_of(head)) as llm:
        [found] = llm.generate(TokensPrompt(prompt_token_ids=PROMPT), params, use_tqdm=False)
        assert len(found.prompt_logprobs or ()) == len(PROMPT)
        assert int(llm.stats()["accepted_tokens"]) > 25


def test_drafts_are_verified_while_the_host_process_is_stopped(tmp_path: Path) -> None:
    """Wide layers in bf16, whose steps of few rows have kernels of their own; the head's drafts are mostly wrong."""
    tensors = draw_head(32000, range(0, 32000, 2), seed=1, target_hidden=1024)
    assert (CONFIG["vocab_size"], CONFIG["hidden_size"]) == (32000, 1024)
    head = write_head(tmp_path / "head", tensors, (1, 3, 6))
    flags = [f"--speculative-config={config_of(head)}", "--num-gpu-blocks-override=4096"]
    flags += ["--max-num-seqs=8", "--max-num-batched-tokens=64"]
    with run_engine_process(tmp_path, *flags) as (process, region):
        client = connect(region, process)
        before = client.stats()["draft_tokens"]
        with stopped(process):
            assert count_tokens(client, 200) == [200] * 4
        assert client.stats()["draft_tokens"] > before
        client.close()


@pytest.mark.parametrize(("rows", "style"), [(1, NormStyle.READER), (2, NormStyle.READER), (12, NormStyle.WRITER)])
def test_steps_of_each_style_keep_the_residuals(tmp_path: Path, rows: int, style: NormStyle) -> None:
    """In bf16: those of decode kernels are close to those of kernels for any rows, which leave out no rounding."""
    decoder = test_decode_kernels.make_decoder(qk_norm=False, bias=False)
    layers, hidden = len(decoder.layers), decoder.spec.hidden_size
    read = (0, layers // 2, layers - 1)
    tensors = draw_head(decoder.spec.vocab_size, range(500), seed=1, target_hidden=hidden)
    head = load_eagle(str(write_head(tmp_path / "head", tensors, read)), decoder)
    batch, num_blocks = test_decode_kernels.make_batch([5 + 9 * row for row in range(rows)], 512)
    batch = test_decode_kernels.on_gpu(batch)
    batch.block_tables.clamp_(max=num_blocks - 1)
    batch.input_ids.random_(1000)
    decoder.add_head(head)
    assert plan_of(decoder, rows).norms is style
    runner = Runner(decoder)
    runner.drafter = EagleDrafter(decoder, head, GUESSES)
    found: dict[bool, dict[int, torch.Tensor]] = {True: {}, False: {}}
    for decoding, kept in found.items():

        def keep(batch: Batch, layer: int, residual: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> None:
            kept[layer] = residual[: len(batch.row_slots)].float().clone()

        runner.drafter.keep = keep
        runner.compute_logits(batch, decoder.allocate_kv_cache(num_blocks, 16), Bucket(rows, rows, decoding=decoding))
    for layer in read:
        one, other = (kept[layer] for kept in found.values())
        assert one.shape == (rows, hidden) and float(other.std()) > 0
        assert float((one - other).abs().max()) <= 0.05 * float(other.abs().max())


def test_a_step_in_segments_is_drafted_behind_as_a_whole_one(clockwork: tuple[Path, Path]) -> None:
    """Another step runs between its segments, of which the head keeps the residuals apart."""
    drivers: list[Driver] = []
    for _ in range(2):
        decoder = load_decoder(clockwork[0], "cuda", torch.float32)
        head = load_eagle(str(clockwork[1]), decoder)
        decoder.add_head(head, 64)
        driver = Driver(decoder)
        driver.runner.drafter = EagleDrafter(decoder, head, GUESSES)
        driver.add(PROMPT, 9)
        drivers.append(driver)
    whole, cut = drivers
    whole.step()
    tokens = cut._compose([(cut.sequences[0], len(PROMPT))])
    size, residual = Bucket(tokens, 1, decoding=False), torch.zeros(64, cut.decoder.spec.hidden_size, device="cuda")
    drafter = cut.runner.drafter
    assert drafter is not None
    drafter.reserve(cut.batch, residual)
    other: Batch = dataclasses.replace(cut.batch, header=cut.batch.header.clone())
    for layers in (range(1), range(1, 2)):
        cut.runner.forward_segment(cut.batch, cut.kv_cache, size, layers, residual)
        drafter.keep(other, 0, torch.zeros_like(residual[:1]))
    assert torch.equal(cut.batch.head_drafts, whole.batch.head_drafts)
    assert int(whole.batch.head_drafts.count_nonzero()) >= 2 + GUESSES
