# SPDX-License-Identifier: Apache-2.0
"""GPUs that share a model: the tokens and logprobs of transformers, while the host process runs and while not."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from blink import LLM, SamplingParams
from blink.link.client import EngineClient
from blink.models.weights.source import read_spec
from blink.region.layout import CqeKind
from embeddings_check import check_embeddings
from engine_process import connect, run_engine_process, stopped
from gguf_conversion import convert
from gpu_counts import TWO_GPUS, on_ranks
from mixed_requests import check_ranks
from model_families import MXFP4, check, generate, make_prompts, save_model, scores_of
from quantized_checkpoints import write_checkpoints
from wide_families import widen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    TWO_GPUS,
]

DENSE = ["llama-3.1", "llama-biased", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3-short", "olmo2", "granite"]
DENSE += ["opt", "olmo3", "smollm3", "seed_oss", "ernie4_5"]
# Experts in parts and whole, with routers of all kinds; recurrent layers, latents, and layers with inputs of their own.
OTHERS = ["qwen3_moe-plain", "gpt_oss", "qwen3_next", "qwen3_5", "granite4-hybrid", "granite4-hybrid-dense"]
OTHERS += ["deepseek_v3", "glm4_moe_lite", "glm4_moe", "minimax_m2", "gemma4-moe", "gemma4", "llama4", "ernie4_5_moe"]
Scored = tuple[int, float]  # a token and its logprob
PROMPTS = [*make_prompts()[2:5], make_prompts()[7]]
QUANTIZED = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024}  # of four ranks


def save(name: str, path: Path, ranks: int) -> Any:
    """Write the model of a family, with more heads where ranks are more than two."""
    return save_model(name, path, **(widen(name, ranks) if ranks > 2 else {}))


def write_quantized(path: Path, scheme: str, ranks: int, **changes: Any) -> tuple[Path, Path]:
    """Write a quantized checkpoint and the same dequantised, with more heads where ranks are more than two."""
    return write_checkpoints(path, scheme, **(QUANTIZED if ranks > 2 else {}), **changes)


@on_ranks
@pytest.mark.parametrize("name", [*DENSE, *OTHERS])
def test_gpus_give_the_tokens_and_logprobs_of_transformers(name: str, ranks: int, tmp_path: Path) -> None:
    model = save(name, tmp_path, ranks)
    check(model, PROMPTS, generate(tmp_path, PROMPTS, "cuda", tensor_parallel_size=ranks))


def score(path: Path, **options: Any) -> torch.Tensor:
    """Return the logprobs of the prompts' tokens."""
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 56, "num_gpu_blocks_override": 200}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    with LLM(model=str(path), skip_tokenizer_init=True, **sizes, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return torch.tensor([one for output in outputs for one in scores_of(output)])


def check_near_one(path: Path, ranks: int, **options: Any) -> None:
    """Compare the errors of ranks and of one GPU, against float32 on a CPU.

    Ranks round sums of their own parts. Kernels of many rows, which ranks take earlier, round activations to FP8.
    """
    exact = score(path, device="cpu", dtype="float32")
    found = (score(path, device="cuda", dtype="auto", tensor_parallel_size=size, **options) for size in (1, ranks))
    one, many = (float((scores - exact).square().mean().sqrt()) for scores in found)
    assert one < 0.25 and many < 2.5 * one + 0.005, (one, many)


@on_ranks
@pytest.mark.parametrize("scheme", ["fp8-channel", "fp8-block", "awq", "packed-head"])
def test_quantized_matrices_are_those_of_one_gpu(scheme: str, ranks: int, tmp_path: Path) -> None:
    check_near_one(write_quantized(tmp_path, scheme, ranks)[0], ranks)


@on_ranks
@pytest.mark.parametrize(("scheme", "width"), [("fp8-channel", 256), ("fp8-block", 128)])
def test_quantized_experts_are_those_of_one_gpu(scheme: str, width: int, ranks: int, tmp_path: Path) -> None:
    """In parts, and whole."""
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    check_near_one(write_quantized(tmp_path, scheme, ranks, **experts, moe_intermediate_size=width)[0], ranks)


@on_ranks
def test_mxfp4_experts_are_those_of_one_gpu(ranks: int, tmp_path: Path) -> None:
    save(MXFP4, tmp_path, ranks)
    check_near_one(tmp_path, ranks)


@on_ranks
def test_matrices_of_a_gguf_file_are_those_of_one_gpu(ranks: int, tmp_path: Path) -> None:
    _, plain = write_quantized(tmp_path, "awq", ranks)
    kinds = (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0)
    convert(plain, tmp_path / "model.gguf", gguf.MODEL_ARCH.QWEN3, read_spec(plain), kinds)
    check_near_one(tmp_path / "model.gguf", ranks)


@on_ranks
def test_embeddings_are_transformers(ranks: int, tmp_path: Path) -> None:
    check_embeddings(tmp_path, "mean_tokens", 1e-4, dtype="float32", tensor_parallel_size=ranks)


@on_ranks
def test_a_cache_in_fp8_is_that_of_one_gpu(ranks: int, tmp_path: Path) -> None:
    save("llama-3.1", tmp_path, ranks)
    check_near_one(tmp_path, ranks, kv_cache_dtype="fp8")


@on_ranks
@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 4}], ids=["plain", "drafts"])
def test_mixed_requests_are_answered_as_by_one_gpu(drafts: dict[str, Any] | None, ranks: int, tmp_path: Path) -> None:
    count = 10_000 if drafts is None else 2000
    check_ranks(tmp_path, count, ranks=ranks, device="cuda", dtype="float32", speculative_config=drafts)


def run_requests(client: EngineClient, count: int, tokens: int) -> list[list[Scored]]:
    """Return the tokens of greedy requests with their logprobs, each of its own prompt."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, logprobs=0)
    prompts = np.random.default_rng(5).integers(10, 30000, (count, 30)).astype(np.int32)
    sequences = [client.submit(prompt, params, seed=1) for prompt in prompts]
    found: dict[Any, list[Scored]] = {sequence: [] for sequence in sequences}
    num_open, deadline = count, time.monotonic() + 60
    while num_open:
        assert time.monotonic() < deadline, f"{num_open} requests did not end"
        assert client.tick() is None
        completions = client.drain()
        num_open -= int((completions["finish_reason"] != 0).sum())
        for one in completions[completions["kind"] == CqeKind.TOKEN]:
            found[int(one["sequence"])].append((int(one["token"]), float(one["logprob"])))
    return [found[sequence] for sequence in sequences]


def count_equal(one: list[Scored], other: list[Scored]) -> int:
    """Return how many tokens are equal; behind them may be a tie, which steps of other sizes decide otherwise."""
    equal = next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a[0] != b[0]), len(one))
    compared = slice(equal + 1)
    for a, b in zip(one[compared], other[compared], strict=True):
        assert a[1] == pytest.approx(b[1], abs=1e-3)
    return equal


@on_ranks
@pytest.mark.slow
def test_a_stopped_host_process_changes_no_token(ranks: int, tmp_path: Path) -> None:
    flags = "--num-gpu-blocks-override=8192", f"--tensor-parallel-size={ranks}", "--max-num-seqs=32", "--dtype=float32"
    with run_engine_process(tmp_path, *flags) as (process, region):
        client = connect(region, process)
        running = run_requests(client, 24, 400)
        with stopped(process):
            frozen = run_requests(client, 24, 400)
        client.close()
    equal = [count_equal(a, b) for a, b in zip(frozen, running, strict=True)]
    assert sum(count == 400 for count in equal) > 16, equal


@on_ranks
@pytest.mark.slow
def test_a_rank_that_hangs_is_reported_within_seconds(ranks: int, tmp_path: Path) -> None:
    flags = "--num-gpu-blocks-override=4096", f"--tensor-parallel-size={ranks}", "--max-num-seqs=8"
    begin, seconds, reason, status = tmp_path / "begin", 0.0, None, None
    program = str(Path(__file__).parents[1] / "shared" / "hanging_rank.py"), str(begin)
    with suppress(AssertionError), run_engine_process(tmp_path, *flags, program=program) as (process, region):
        client = connect(region, process)
        run_requests(client, 4, 50)
        begin.touch()
        time.sleep(0.1)
        client.submit(np.arange(10, dtype=np.int32), SamplingParams(max_tokens=100, ignore_eos=True), seed=1)
        start = time.monotonic()
        while (reason := client.tick()) is None and seconds < 20:
            client.drain()
            seconds = time.monotonic() - start
        status = process.wait(20)
    assert reason is not None and "RANK_LOST" in reason
    assert seconds < 3.5 and status == 1
