# SPDX-License-Identifier: Apache-2.0
"""`--deterministic` on the GPU engine: tokens and the bits of logprobs do not depend on what else a step computes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from blink.runner.step import Step
from free_drafts import load_without_costs
from tiny_model import write_tiny_model

OrderedNorms = pytest.importorskip("blink.runner.gpu_ordered").OrderedNorms
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 2000,
    "enable_prefix_caching": False,
    "deterministic": True,
}
MAX_ROWS = 24
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
FEW_TOKENS = dict.fromkeys((40, 41, 42, 43), 40.0)  # texts of few tokens repeat themselves, so that drafts are taken
# Keys are cut at every 256th. The last rows have tokens of both sides in one tile of queries.
LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 129, 200, 240, 254, 255, 256, 257, 300, 511, 700)

Answer = tuple[list[int], list[dict[int, float]]]


@pytest.fixture(scope="module", autouse=True, params=["chunks", "ordered"])
def kernels(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Take the kernels of decoding, or those before them; return which, and whether steps begin so."""
    found, begin = [str(request.param)], OrderedNorms.__init__

    def note(self: Any, step: Step) -> None:
        found.append("begun")
        begin(self, step)

    patch = pytest.MonkeyPatch()
    if request.param == "chunks":
        patch.setattr("blink.kernels.gpu.gemm.in_tiles.refuses", lambda *_: "other kernels are tested")
    patch.setattr(OrderedNorms, "__init__", note)
    yield found
    patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deterministic")


def load(folder: Path, chunk: int, family: str = "llama", **options: Any) -> LLM:
    model = str(write_tiny_model(folder / family, **(SIZES | FAMILIES[family])))
    sizes = {"max_num_seqs": min(chunk, MAX_ROWS), "max_num_batched_tokens": chunk}
    return load_without_costs(model, **(OPTIONS | sizes | options))


def make_prompts() -> list[list[int]]:
    script = random.Random(5)
    return [[script.randrange(5, 4000) for _ in range(length)] for length in LENGTHS]


def make_params(temperature: float, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=7, max_tokens=24, logprobs=3, ignore_eos=True, top_p=0.95, **options
    )


def answer(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
    """Return the tokens of each answer, and all logprobs of it and of its prompt."""
    found = llm.generate(prompts, params, use_tqdm=False)
    answers = list[Answer]()
    for one in found:
        [choice] = one.outputs
        places = [*(choice.logprobs or []), *(one.prompt_logprobs or [])[1:]]
        logprobs = [{token: each.logprob for token, each in (place or {}).items()} for place in places]
        answers.append(([*choice.token_ids], logprobs))
    return answers


def answer_alone(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
    return [answer(llm, [prompt], params)[0] for prompt in prompts]


@pytest.fixture(scope="module")
def alone(folder: Path, kernels: list[str]) -> Iterator[dict[str, list[Answer]]]:
    """Return the answers to prompts that are computed whole, and alone; by the parameters."""
    with load(folder, 1024) as llm:
        found = {name: answer_alone(llm, make_prompts(), params) for name, params in PARAMS.items()}
        assert vars(llm)["_client"].fingerprint.startswith("cuda-")
    assert ("begun" in kernels) is (kernels[0] == "ordered")
    assert len({tuple(tokens) for tokens, _ in found["sampled"]}) > len(LENGTHS) // 2  # prompts matter
    yield found


PARAMS = {
    "sampled": make_params(0.8),
    "greedy": make_params(0.0),
    "scored": make_params(0.8, prompt_logprobs=0),
    "few": make_params(0.8, logit_bias=FEW_TOKENS),
}


@pytest.mark.parametrize("chunk", [1024, 16, 72])
def test_bits_do_not_depend_on_chunks_and_neighbours(folder: Path, chunk: int, alone: dict[str, list[Answer]]) -> None:
    with load(folder, chunk) as llm:
        for name in ("sampled", "greedy", "scored"):
            assert answer(llm, make_prompts(), PARAMS[name]) == alone[name], name


def test_bits_do_not_depend_on_the_prefix_cache(folder: Path, alone: dict[str, list[Answer]]) -> None:
    with load(folder, 96, enable_prefix_caching=True) as llm:
        for _ in range(2):
            assert answer(llm, make_prompts(), PARAMS["sampled"]) == alone["sampled"]
        assert llm.stats()["prefix_hits"] > 0


def test_bits_do_not_depend_on_preemption(folder: Path, alone: dict[str, list[Answer]]) -> None:
    with load(folder, 256, num_gpu_blocks_override=66) as llm:  # of 16 tokens: one long prompt and a few others
        assert answer(llm, make_prompts(), PARAMS["sampled"]) == alone["sampled"]
        assert llm.stats()["num_preemptions"] > 0


def test_bits_do_not_depend_on_drafts(folder: Path, alone: dict[str, list[Answer]]) -> None:
    with load(folder, 256, speculative_config=SPECULATIVE) as llm:
        assert answer(llm, make_prompts(), PARAMS["few"]) == alone["few"]
        assert llm.stats()["accepted_tokens"] > 0


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen2", {}), ("qwen3", {}), ("llama", {"quantization": "fp8"})],
    ids=["biases", "head-norms", "fp8"],
)
def test_bits_of_other_models_and_formats_depend_on_nothing_else(
    folder: Path, family: str, options: dict[str, Any]
) -> None:
    prompts = make_prompts()[-9:]
    with load(folder, 128, family, **options) as llm:
        expected = answer_alone(llm, prompts, PARAMS["scored"])
        assert answer(llm, prompts, PARAMS["scored"]) == expected
