# SPDX-License-Identifier: Apache-2.0
"""The default model's greedy tokens are those that transformers generated, in float32, when they were recorded.

tests/e2e/test_greedy_equality.py (`make test-all`) lets transformers generate anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blink.config import ModelConfig
from blink.models.decoder import Decoder
from blink.models.weights.files import default_model_path
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.loader import load_model
from model_driver import Driver

NUM_TOKENS = 16
RECORDING = Path(__file__).parents[1] / "e2e" / "greedy_tokens.json"

pytestmark = pytest.mark.skipif(not default_model_path().is_file(), reason="needs the default model's own weights")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Prompts and greedy continuations of the shortest prompts."""
    recorded = sorted(json.loads(RECORDING.read_text()), key=lambda entry: len(entry["prompt"]))
    return [entry["prompt"] + entry["output"][:NUM_TOKENS] for entry in recorded[:4]]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_model(ModelConfig(), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    "max_chunk", [pytest.param(1024, marks=pytest.mark.long), 7, pytest.param(2, marks=pytest.mark.long)]
)
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


def test_weights_take_the_bytes_that_the_file_has_for_them(decoder: Decoder) -> None:
    file = GgufFile(default_model_path())
    assert decoder.num_weight_bytes == sum(tensor.num_bytes for tensor in file.tensors.values())


def test_weights_that_are_dequantised_give_the_same_tokens(expected: list[list[int]]) -> None:
    decoder = load_model(ModelConfig(dtype="float32"), torch.device("cpu"), torch.float32)
    assert decoder.num_weight_bytes >= 4 * decoder.spec.num_parameters
    driver = Driver(decoder)
    for tokens in expected[:2]:
        driver.add(tokens[:-NUM_TOKENS], NUM_TOKENS)
    assert driver.run(max_chunk=7) == expected[:2]


def test_bfloat16_gives_the_same_first_tokens(expected: list[list[int]]) -> None:
    driver = Driver(load_model(ModelConfig(), torch.device("cpu"), torch.bfloat16))
    some = [expected[0], *expected[2:]]  # of the second prompt two tokens are as likely, and processors round otherwise
    for tokens in some:
        driver.add(tokens[:-NUM_TOKENS], 3)
    assert driver.run() == [tokens[: len(tokens) - NUM_TOKENS + 3] for tokens in some]
