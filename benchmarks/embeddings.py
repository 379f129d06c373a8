# SPDX-License-Identifier: Apache-2.0
"""Texts embedded per second, and what share that is of the GPU's measured matrix speed.

The model has the shape of Qwen3-Embedding-0.6B and random weights. Counted are the multiplications of its matrices and
of attention, two operations each. The matrix speed is that of torch.matmul in bfloat16, measured before the engine
starts, on the shapes of the model's own matrices at the step's number of tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

_LAYERS = 28
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 151669,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
_HEADS, _DIM = 16, 128
# Columns and rows of the matrices of a layer: qkv, output, gate and up, down.
SHAPES = [(1024, (16 + 2 * 8) * 128), (16 * 128, 1024), (1024, 2 * 3072), (3072, 1024)]


def count_operations(lengths: list[int]) -> float:
    """Return the operations of embedding texts of these numbers of tokens."""
    matrices = 2 * sum(lengths) * sum(rows * columns for rows, columns in SHAPES)
    attention = sum(2 * 2 * length * (length + 1) / 2 * _HEADS * _DIM for length in lengths)
    return _LAYERS * (matrices + attention)


def measure_matrices(device: str, tokens: int, repeats: int) -> float:
    """Return operations per second of torch.matmul over the matrices of a layer, the median of several runs."""
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pairs = [
        (torch.randn(tokens, k, dtype=dtype, device=device), torch.randn(k, n, dtype=dtype, device=device))
        for k, n in SHAPES
    ]
    done = torch.cuda.synchronize if device == "cuda" else lambda: None
    operations = 2 * tokens * sum(k * n for k, n in SHAPES)
    rates: list[float] = []
    for run in range(repeats + 1):  # the first warms up
        rounds = 50 if device == "cuda" else 1
        start = time.perf_counter()
        for _ in range(rounds):
            for left, right in pairs:
                torch.matmul(left, right)
        done()
        rates += [rounds * operations / (time.perf_counter() - start)] if run else []
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200, help="of each text")
    parser.add_argument("--step-tokens", type=int, default=8192, help="--max-num-batched-tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    speed = measure_matrices(options.device, options.step_tokens, options.repeats)

    from blink import LLM

    prompts = [[(7 * text + place) % 150_000 for place in range(options.tokens)] for text in range(options.texts)]
    operations = count_operations([options.tokens] * options.texts)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        sizes = {"max_model_len": max(options.tokens, 512), "max_num_batched_tokens": options.step_tokens}
        with LLM(
            folder, load_format="dummy", runner="pooling", skip_tokenizer_init=True, device=options.device, **sizes
        ) as llm:
            for _ in range(options.repeats + 1):
                start = time.perf_counter()
                llm.embed(prompts, use_tqdm=False)
                seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    figures = {
        "texts_per_second": options.texts / median,
        "tokens_per_second": options.texts * options.tokens / median,
        "tflops": operations / median / 1e12,
        "matrix_tflops": speed / 1e12,
        "share": operations / median / speed,
    }
    for name, value in figures.items():
        print(f"{name:>18}: {value:,.3f}")
    if options.output:
        options.output.write_text(json.dumps({**figures, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
