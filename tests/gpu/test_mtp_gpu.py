# SPDX-License-Identifier: Apache-2.0
"""The GPU engine with a model's own draft layer (MTP): tokens as without drafts, of which as many are accepted as on a
CPU.

The model has recurrent layers. With noise they lead the text another way than the layer drafts.
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import test_decode_kernels
from test_recurrent_steps import MODELS

from blink import LLM, SamplingParams
from blink.config import ModelConfig
from blink.kernels.batch import Batch
from blink.kernels.layer_cache import LayerCache
from blink.models.decoder import Decoder
from blink.models.weights.loader import load_model
from blink.plan.execution_plan import NormStyle
from blink.plan.site import Bucket
from blink.request.source import TokensPrompt
from blink.runner.run import Runner
from engine_process import connect, count_tokens, run_engine_process, stopped
from free_drafts import load_without_costs
from mtp_layers import WIDE, write_clockwork
from step_plans import plan_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]
VOCAB, LENGTH, DRAFTS, NOISE = 2048, 96, 4, 0.022
PROMPT = [300 + 7 * at for at in range(40)]
PROMPTS = [PROMPT[at:] * (1 + at % 5) for at in range(8)]  # some take several steps
OPTIONS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512}
OPTIONS |= {"num_gpu_blocks_override": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 128}
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": DRAFTS})
COUNTS = ("num_steps", "num_drafts", "draft_tokens", "accepted_tokens", "prefix_hits", "num_preemptions")


@functools.cache
def write_model(folder: Path, noise: float) -> str:
    return str(write_clockwork(folder / f"noise-{noise}", VOCAB, noise=noise))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clockwork")


@pytest.fixture(params=[0.0, NOISE], ids=["known", "noisy"])
def model(request: pytest.FixtureRequest, folder: Path) -> str:
    return write_model(folder, request.param)


def ask(llm: LLM, prompts: list[list[int]], **params: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Return answers, and what the engine counts meanwhile."""
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    before = llm.stats()
    found = llm.generate(asked, SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params), use_tqdm=False)
    after = llm.stats()
    return [[*each.outputs[0].token_ids] for each in found], {name: int(after[name] - before[name]) for name in COUNTS}


Answers = list[tuple[list[list[int]], dict[str, int]]]


def play(model: str, device: str, *asked: tuple[list[list[int]], float], **options: Any) -> Answers:
    """Return the answers to some prompts at a temperature, and to the next ones, by a new engine."""
    with load_without_costs(model, device=device, **OPTIONS | options) as llm:
        return [ask(llm, prompts, temperature=temperature, seed=3) for prompts, temperature in asked]


def test_as_many_drafts_are_accepted_as_on_a_cpu(model: str) -> None:
    """Of one sequence exactly; of eight, some of which wait for others' prompts, nearly."""
    asked = ([PROMPT], 0.0), (PROMPTS, 0.0)
    plain = play(model, "cuda", *asked)
    found = play(model, "cuda", *asked, speculative_config=MTP)
    on_cpu = play(model, "cpu", *asked, speculative_config=MTP)
    assert [answers for answers, _ in found] == [answers for answers, _ in plain]
    assert {len({*answer}) > 80 for answers, _ in found for answer in answers} == {True}
    (_, one), (_, eight) = found
    (_, one_on_cpu), (_, eight_on_cpu) = on_cpu
    assert {name: one[name] for name in COUNTS[1:4]} == {name: one_on_cpu[name] for name in COUNTS[1:4]}
    assert one["accepted_tokens"] > 15 and one["num_steps"] < plain[0][1]["num_steps"]
    assert eight["accepted_tokens"] > 8 * 15 and eight["num_steps"] < plain[1][1]["num_steps"]
    shares = (each["accepted_tokens"] / each["draft_tokens"] for each in (eight, eight_on_cpu))
    assert abs(next(shares) - next(shares)) < 0.05


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_tokens_are_those_without_drafts(folder: Path, kv_cache_dtype: str) -> None:
    """The second time prompts are cached."""
    noisy, asked = write_model(folder, NOISE), (([PROMPT], 0.8), (PROMPTS, 0.8), (PROMPTS, 0.8), (PROMPTS, 0.0))
    plain = play(noisy, "cuda", *asked, kv_cache_dtype=kv_cache_dtype)
    found = play(noisy, "cuda", *asked, kv_cache_dtype=kv_cache_dtype, speculative_config=MTP)
    assert [answers for answers, _ in found] == [answers for answers, _ in plain]
    assert all(counts["draft_tokens"] > counts["accepted_tokens"] > 0 for _, counts in found)


def test_drafts_go_on_from_a_cached_prefix(folder: Path) -> None:
    prompt = [20 + 3 * at for at in range(160)]
    found = play(write_model(folder, NOISE), "cuda", ([prompt], 0.0), ([prompt], 0.0), speculative_config=MTP)
    (first, before), (second, after) = found
    assert first == second and (before["prefix_hits"], after["prefix_hits"]) == (0, 9 * 16)
    assert before["accepted_tokens"] == after["accepted_tokens"] > 15


def test_sequences_that_are_preempted_go_on_as_they_were(folder: Path) -> None:
    prompts, noisy = [PROMPT[at : at + 24] for at in range(10)], write_model(folder, NOISE)
    [(expected, _)] = play(noisy, "cuda", (prompts, 0.7))
    [(answers, counts)] = play(noisy, "cuda", (prompts, 0.7), speculative_config=MTP, num_gpu_blocks_override=34)
    assert answers == expected
    assert min(counts["accepted_tokens"], counts["num_preemptions"]) > 0


def test_newer_weights_are_drafted_for(folder: Path, tmp_path: Path) -> None:
    """The engine's graphs read them where the first ones were."""
    other = str(write_clockwork(tmp_path, VOCAB, noise=0, seed=6))
    [(expected, known)] = play(other, "cuda", ([PROMPT], 0.0), speculative_config=MTP)
    options = OPTIONS | {"speculative_config": MTP}
    with load_without_costs(write_model(folder, 0.0), device="cuda", **options) as llm:
        before, _ = ask(llm, [PROMPT], temperature=0.0)
        llm.update_weights_from_disk(other)
        answers, counts = ask(llm, [PROMPT], temperature=0.0)
    assert answers == expected != before
    assert counts["accepted_tokens"] == known["accepted_tokens"] > 15


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_wide_layers_in_16_and_8_bits_draft_what_follows(tmp_path: Path, quantization: str) -> None:
    """Steps of few rows have kernels of their own, and so have matrices in FP8."""
    model = str(write_clockwork(tmp_path, VOCAB, noise=0, **WIDE))
    options = {"dtype": "bfloat16", "quantization": quantization, "speculative_config": MTP}
    for answers, counts in play(model, "cuda", ([PROMPT], 0.0), (PROMPTS, 0.0), **options):
        assert {len(each) for each in answers} == {LENGTH}
        assert counts["accepted_tokens"] > 0.95 * counts["draft_tokens"] > 60 * len(answers)


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_each_family_are_drafted_with(name: str, quantization: str, tmp_path: Path) -> None:
    """Random weights, dense and of experts: drafts are wrong, and no answer ends early."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name] | {"architectures": [name]}))
    options = {"load_format": "dummy", "dtype": "bfloat16", "quantization": quantization, "max_model_len": 128}
    with load_without_costs(str(tmp_path), device="cuda", **OPTIONS | options, speculative_config=MTP) as llm:
        answers, counts = ask(llm, [[9 + at for at in range(20)], [7] * 30], temperature=0.8, seed=3)
    assert {len(each) for each in answers} == {LENGTH} and counts["num_drafts"] > 0


def test_drafts_are_verified_while_the_host_process_is_stopped_for_5_seconds(tmp_path: Path) -> None:
    name = "Qwen3_5ForCausalLM"
    config = MODELS[name] | {"architectures": [name], "max_position_embeddings": 1024, "vocab_size": VOCAB}
    flags = [f"--speculative-config={MTP}", "--num-gpu-blocks-override=1024"]
    flags += ["--max-num-seqs=8", "--max-num-batched-tokens=64"]
    with run_engine_process(tmp_path, *flags, config=config) as (process, region):
        client = connect(region, process)
        before, end = client.stats()["draft_tokens"], 0.0
        with stopped(process):
            while not end or time.monotonic() < end:
                end = end or time.monotonic() + 5
                assert count_tokens(client, 200) == [200] * 4
        assert client.stats()["draft_tokens"] > before
        client.close()


class Witness:
    """A drafter that notes what the last layer ends with."""

    reads_end = True

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def reserve(self, batch: Batch, residual: torch.Tensor) -> None:
        """Nothing is kept."""

    def keep(self, batch: Batch, layer: int, residual: torch.Tensor) -> None:
        """Note it of a batch's rows."""
        del layer
        self.found = [residual[: len(batch.row_slots)].float().clone()]

    def read(self, batch: Batch, cache: LayerCache, size: Bucket) -> None:
        """Draft nothing."""


def make_plain(tmp_path: Path) -> Decoder:  # noqa: ARG001
    return test_decode_kernels.make_decoder(qk_norm=False, bias=False)


def make_recurrent(tmp_path: Path) -> Decoder:
    name = "Qwen3_5MoeForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name] | {"architectures": [name]}))
    config = ModelConfig(model=str(tmp_path), load_format="dummy")
    return load_model(config, torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "rows", "style"),
    [(make_plain, 1, NormStyle.READER), (make_plain, 12, NormStyle.WRITER), (make_recurrent, 2, NormStyle.READER)],
)
def test_steps_of_each_style_show_what_the_last_layer_ends_with(
    make: Any, rows: int, style: NormStyle, tmp_path: Path
) -> None:
    """In bf16: those of decode kernels are close to those of kernels for any rows, which leave out no rounding.

    A router may choose other experts where two of them are nearly alike, so a few rows may differ.
    """
    decoder = make(tmp_path)
    batch, num_blocks = test_decode_kernels.make_batch([5 + 9 * row for row in range(rows)], 512)
    batch = test_decode_kernels.on_gpu(batch)
    batch.block_tables.clamp_(max=num_blocks - 1)
    assert plan_of(decoder, rows).norms is style
    runner, draw, are_near = Runner(decoder), torch.Generator("cuda").manual_seed(3), list[torch.Tensor]()
    for _ in range(8):
        batch.input_ids.random_(100, generator=draw)
        found = list[torch.Tensor]()
        for decoding in (True, False):
            runner.drafter = witness = Witness()
            cache = decoder.allocate_kv_cache(num_blocks, 16, rows + 1)
            runner.compute_logits(batch, cache, Bucket(rows, rows, decoding=decoding))
            found += witness.found
        one, other = found
        assert one.shape == (rows, decoder.spec.hidden_size) and float(other.std()) > 0
        are_near.append((one - other).abs().amax(1) <= 0.05 * other.abs().max())
    assert torch.cat(are_near).float().mean() > 0.7
