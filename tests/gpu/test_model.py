# SPDX-License-Identifier: Apache-2.0
"""A model of random weights on the GPU, against the CPU engine: float32 by tokens, bfloat16 by logits.

Its layers have the sizes of the default model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blink import LLM, SamplingParams
from model_driver import Driver, load_decoder
from prose import LENGTHS
from quantized_checkpoints import write_checkpoints

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
# Logits have a standard deviation of 1. PyTorch's own bfloat16 on a CPU is off by up to 0.021 and 0.09.
RMS_TOLERANCE, MAX_TOLERANCE = 0.04, 0.15


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in float32."""
    return write_checkpoints(tmp_path_factory.mktemp("model"), "fp8-channel", **SIZES)[1]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(SIZES["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]


def generate(model: Path, device: str, prompts: list[list[int]]) -> list[list[int]]:
    with LLM(str(model), device=device, dtype="float32", skip_tokenizer_init=True) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def compute_logits(model: Path, device: str, dtype: torch.dtype, prompts: list[list[int]]) -> torch.Tensor:
    """Logits behind each prompt, all prompts in one step."""
    driver = Driver(load_decoder(model, device, dtype), num_slots=len(prompts), max_len=640)
    for prompt in prompts:
        driver.add(prompt, 1)
    return driver.compute_logits().float().cpu()


def test_float32_tokens_are_those_of_the_cpu_engine(model: Path, prompts: list[list[int]]) -> None:
    assert generate(model, "cuda", prompts) == generate(model, "cpu", prompts)


def test_bfloat16_logits_are_close_to_float32(model: Path, prompts: list[list[int]]) -> None:
    exact = compute_logits(model, "cpu", torch.float32, prompts)
    found = compute_logits(model, "cuda", torch.bfloat16, prompts)
    error = (found - exact).abs()
    assert float(error.square().mean(1).sqrt().max()) < RMS_TOLERANCE
    assert float(error.max()) < MAX_TOLERANCE
    # The token it chooses is the best one, or as good as the best within the tolerance.
    chosen = exact.gather(1, found.argmax(1, keepdim=True))[:, 0]
    assert float((exact.max(1).values - chosen).max()) < RMS_TOLERANCE
