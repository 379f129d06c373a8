# SPDX-License-Identifier: Apache-2.0
"""Times sampling with Llama-3's vocabulary, against the time that one pass over the logits takes at 4.3 TB/s.

Run with: python benchmarks/kernels/sampling.py [--rows 1 32 64 256] [--group cluster block]
"""

from __future__ import annotations

import argparse

import torch
from median import median_us
from torch import Tensor

from blink.grammar.compiler import compile_structured
from blink.kernels.batch import Batch, Header, Param
from blink.kernels.gpu import sampling
from blink.structured_outputs import StructuredOutputsParams

_VOCAB, _PROMPT, _CONTEXT = 128256, 200, 400
_BYTES_PER_US = 4.3e6
_CASES: dict[str, dict[Param, float]] = {
    "greedy": {},
    "temperature": {Param.TEMPERATURE: 1.0},
    "top_p": {Param.TEMPERATURE: 1.0, Param.TOP_P: 0.95},
    "top_k": {Param.TEMPERATURE: 1.0, Param.TOP_K: 50},
    "penalties": {Param.REPETITION_PENALTY: 1.1, Param.FREQUENCY_PENALTY: 0.3},
    "bitmask": {Param.TEMPERATURE: 1.0, Param.AUTOMATON: 1},
    "logprobs": {Param.NUM_LOGPROBS: 20},
    "all": {
        Param.TEMPERATURE: 0.8,
        Param.TOP_K: 50,
        Param.TOP_P: 0.9,
        Param.MIN_P: 0.02,
        Param.REPETITION_PENALTY: 1.1,
        Param.FREQUENCY_PENALTY: 0.3,
        Param.NUM_LOGPROBS: 5,
    },
}


def main() -> None:
    """Print medians in microseconds of all kernels of a step's sampling, replayed from a CUDA graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 64, 256])
    parser.add_argument("--group", nargs="*", default=[], help="cluster, block; default: what a server takes")
    options = parser.parse_args()
    names = options.group or ["default"]
    print(f"{'case':12} {'rows':>5} {'floor us':>8} {' '.join(f'{name:>8}' for name in names)}")
    for num_rows in options.rows:
        logits = (torch.randn(num_rows, _VOCAB, device="cuda") * 3).bfloat16()
        for name, values in _CASES.items():
            times = " ".join(f"{_measure(logits, _make_batch(num_rows, values), group):8.2f}" for group in names)
            print(f"{name:12} {num_rows:5} {logits.nbytes / _BYTES_PER_US:8.2f} {times}", flush=True)


def _measure(logits: Tensor, batch: Batch, group: str) -> float:
    wanted = None if group == "default" else sampling.Group[group.upper()]

    def call() -> None:
        sampling.sample(logits, batch, logits.shape[0], wanted)

    return median_us(call)


def _make_batch(num_rows: int, values: dict[Param, float]) -> Batch:
    batch = Batch.allocate(
        max_tokens=1, max_rows=num_rows, num_slots=num_rows, max_blocks=1, max_model_len=1024, device="cuda",
        num_automata=1, vocab_size=_VOCAB, vocab_bytes=_VOCAB,
    )  # fmt: skip
    batch.token_starts.copy_(torch.arange(_VOCAB + 1))
    batch.token_text.fill_(ord("x"))
    automaton = compile_structured(StructuredOutputsParams(regex="x*")).data
    batch.automata[0, : len(automaton)] = torch.frombuffer(bytearray(automaton), dtype=torch.uint8).cuda()
    batch.automaton_places.fill_(-1)
    neutral = {
        Param.TOP_P: 1.0,
        Param.REPETITION_PENALTY: 1.0,
        Param.NUM_LOGPROBS: -1,
        Param.NUM_PROMPT_TOKENS: _PROMPT,
    }
    for param, value in {**neutral, **values}.items():
        (batch.params_f32 if param <= Param.FREQUENCY_PENALTY else batch.params)[:, param] = value
    batch.header[Header.NUM_ROWS] = num_rows
    batch.row_slots.copy_(torch.arange(num_rows))
    batch.params[:, Param.SEED_LOW] = batch.row_slots
    batch.context_lens.fill_(_PROMPT if Param.AUTOMATON in values else _CONTEXT)
    batch.tokens.random_(0, _VOCAB)
    return batch


if __name__ == "__main__":
    main()
