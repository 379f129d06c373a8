# SPDX-License-Identifier: Apache-2.0
"""The default model against transformers' float32 generate, both loaded from the same GGUF file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from blink.config import ModelConfig
from blink.models.decoder import Decoder
from blink.models.weights.files import default_model_path
from blink.models.weights.loader import load_model
from model_driver import Driver

NUM_TOKENS = 16
# "The capital of France is", "def fibonacci(n):\n    ", a question in the chat format, "x"
PROMPTS = (
    [504, 3575, 282, 4649, 314],
    [1604, 3987, 46477, 24, 94, 727, 2367],
    [1, 4093, 198, 5820, 1296, 7626, 282, 3518, 28, 284, 327, 971, 260, 3426, 30, 2, 198, 1, 520, 9531, 198],
    [104],
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # transformers takes long to read a GGUF file
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model is not in Blink's cache"),
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Prompts and greedy continuations of transformers."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    path = default_model_path()
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        return [
            model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0].tolist()
            for prompt in PROMPTS
        ]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_model(ModelConfig(), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("max_chunk", [1024, 7, 2])
def test_greedy_tokens_equal_those_of_transformers(decoder: Decoder, expected: list[list[int]], max_chunk: int) -> None:
    driver = Driver(decoder)
    for tokens in expected:
        driver.add(tokens[:-NUM_TOKENS], NUM_TOKENS)
    assert driver.run(max_chunk) == expected


def test_sequences_that_arrive_while_others_decode_get_the_same_tokens(
    decoder: Decoder, expected: list[list[int]]
) -> None:
    driver = Driver(decoder, block_size=8)
    for tokens in expected:
        driver.add(tokens[:-NUM_TOKENS], NUM_TOKENS)
        for _ in range(3):
            driver.step(max_chunk=5)
    assert driver.run(max_chunk=5) == expected


def test_bfloat16_gives_the_same_first_tokens(expected: list[list[int]]) -> None:
    driver = Driver(load_model(ModelConfig(), torch.device("cpu"), torch.bfloat16))
    for tokens in expected[:2]:
        driver.add(tokens[:-NUM_TOKENS], 3)
    assert driver.run() == [tokens[: len(tokens) - NUM_TOKENS + 3] for tokens in expected[:2]]
