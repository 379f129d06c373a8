# SPDX-License-Identifier: Apache-2.0
"""The default model's perplexity with weights as the file has them, beside that of the dequantised weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from blink import LLM, SamplingParams
from blink.config import FrontendConfig
from blink.models.weights.files import default_model_path
from blink.text.assets import load_assets

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model is not in Blink's cache"),
]

TEXT = Path(__file__).parents[2] / "LICENSE"
NUM_TOKENS = 1500
BOUND = 1e-5  # of the perplexity: products differ by rounding alone


def measure_perplexity(dtype: str) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    tokenizer = load_assets(FrontendConfig()).tokenizer
    prompt = tokenizer.encode(TEXT.read_text(), add_special_tokens=False)[:NUM_TOKENS]
    with LLM(dtype=dtype, max_model_len=2048) as llm:
        [output] = llm.generate([prompt], params, use_tqdm=False)
    logprobs = [entry.logprob for entry in output.prompt_logprobs]
    assert len(logprobs) == NUM_TOKENS - 1
    return math.exp(-sum(logprobs) / len(logprobs))


def test_perplexity_is_that_of_the_dequantised_weights() -> None:
    quantised, dequantised = measure_perplexity("auto"), measure_perplexity("float32")
    print(f"perplexity {quantised:.6f}, dequantised {dequantised:.6f}")
    assert abs(quantised / dequantised - 1) < BOUND
