# SPDX-License-Identifier: Apache-2.0
"""The default model's perplexity with quantised weights, by the benchmark that measures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark_programs import load_benchmark
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
# Rounding to 3 bits of mantissa costs this model of 135 million weights 4.5 % on this text and 1.2 % on another, as
# much as random changes of the same size (2.6 %); a scale or an order gone wrong costs many times as much.
_MOST = 1.06


def test_perplexity_is_that_of_the_dequantised_weights() -> None:
    program = load_benchmark("perplexity")
    tokenizer = load_assets(FrontendConfig()).tokenizer
    prompt = tokenizer.encode(TEXT.read_text(), add_special_tokens=False)[:NUM_TOKENS]
    found: list[float] = []
    for dtype in ("auto", "float32"):
        logprobs = program.score_prompts([prompt], dtype=dtype, max_model_len=2048)
        assert len(logprobs) == NUM_TOKENS - 1
        found.append(program.find_perplexity(logprobs))
    quantised, dequantised = found
    print(f"perplexity {quantised:.6f}, dequantised {dequantised:.6f}")
    assert abs(quantised / dequantised - 1) < BOUND


def test_weights_rounded_to_fp8_keep_the_perplexity() -> None:
    measure_perplexity = load_benchmark("perplexity").measure_perplexity
    plain = measure_perplexity(device="cpu")
    assert plain < 20
    assert measure_perplexity(device="cpu", quantization="fp8") < plain * _MOST
