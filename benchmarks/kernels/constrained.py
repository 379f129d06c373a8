# SPDX-License-Identifier: Apache-2.0
"""Times sampling with every row constrained by a schema of its own, against the same rows unconstrained.

The vocabulary has Llama-3's 128,256 tokens: those of the default model, repeated, or those of a file of token bytes
(npz with starts and text).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from blink.config import FrontendConfig
from blink.grammar.compiler import compile_structured
from blink.kernels.batch import Batch, Header, Param
from blink.kernels.gpu.constraint import find_allowed
from blink.kernels.gpu.sampling import sample
from blink.structured_outputs import StructuredOutputsParams

_VOCAB, _PROMPT = 128256, 200
_MEMBERS = ("name", "email", "city", "title", "summary", "comment")
# What a text begins with: where few tokens may follow, and where nearly all may.
_BEGINNINGS = {"structure": "{", "string": '{"key0": "some'}


def read_vocabulary() -> tuple[np.ndarray, np.ndarray]:
    """Return starts and text of the vocabulary."""
    if len(sys.argv) > 1:
        known = np.load(sys.argv[1])
        starts, text = known["starts"], known["text"]
    else:
        from blink.text.assets import load_assets
        from blink.text.vocabulary import list_vocabulary

        tokenizer = load_assets(FrontendConfig()).tokenizer
        vocabulary = list_vocabulary(tokenizer, tokenizer.vocab_size)
        starts, text = vocabulary.starts, vocabulary.text
    lengths = np.resize(np.diff(starts), _VOCAB)
    tiled = np.concatenate([text] * (_VOCAB // (len(starts) - 1) + 1))[: -(-lengths.sum() // 8) * 8]
    return np.concatenate([[0], lengths.cumsum()]).astype(np.int32), tiled


def make_batch(num_rows: int, beginning: str | None, starts: np.ndarray, text: np.ndarray) -> Batch:
    """Make a batch whose rows have generated the bytes of a beginning, one token each; None: unconstrained."""
    batch = Batch.allocate(
        max_tokens=1, max_rows=num_rows, num_slots=num_rows, max_blocks=1, max_model_len=1024, device="cuda",
        num_automata=num_rows, vocab_size=_VOCAB, vocab_bytes=len(text),
    )  # fmt: skip
    batch.token_starts.copy_(torch.from_numpy(starts))
    batch.token_text.copy_(torch.from_numpy(text))
    batch.params_f32[:, Param.TOP_P] = batch.params_f32[:, Param.REPETITION_PENALTY] = 1.0
    batch.params_f32[:, Param.TEMPERATURE] = 1.0
    batch.params[:, Param.NUM_LOGPROBS] = -1
    batch.params[:, Param.NUM_PROMPT_TOKENS] = _PROMPT
    batch.header[Header.NUM_ROWS] = num_rows
    batch.row_slots.copy_(torch.arange(num_rows))
    batch.params[:, Param.SEED_LOW] = batch.row_slots
    if beginning is None:
        batch.context_lens.fill_(_PROMPT + 1)
        return batch
    single: dict[int, int] = {
        int(text[starts[token]]): token for token in range(_VOCAB) if starts[token + 1] - starts[token] == 1
    }
    for row in range(num_rows):
        properties = {"key0": {"type": "string"}} | {f"{name}{row}": {"type": "string"} for name in _MEMBERS}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        data = compile_structured(StructuredOutputsParams(json=schema)).data
        batch.automata[row, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
        batch.params[row, Param.AUTOMATON] = row + 1
    for place, byte in enumerate(beginning.encode(), 1):
        batch.tokens[:, _PROMPT + place - 1] = single[byte]
        batch.context_lens.fill_(_PROMPT + place)
        find_allowed(batch, num_rows, _VOCAB)
    return batch


def median_us(call: Callable[[], object]) -> float:
    found: Any = triton.testing.do_bench_cudagraph(call, rep=20, return_mode="median")
    return 1000 * found


def main() -> None:
    """Print medians in microseconds, replayed from a CUDA graph."""
    starts, text = read_vocabulary()
    print(f"{'text':14} {'rows':>5} {'list us':>8} {'sample us':>9}")
    for num_rows in (1, 8, 32, 128):
        logits: Tensor = (torch.randn(num_rows, _VOCAB, device="cuda") * 3).bfloat16()
        for name, beginning in {"unconstrained": None, **_BEGINNINGS}.items():
            batch = make_batch(num_rows, beginning, starts, text)
            listing = median_us(lambda batch=batch, rows=num_rows: find_allowed(batch, rows, _VOCAB))
            whole = median_us(lambda batch=batch, rows=num_rows, logits=logits: sample(logits, batch, rows))
            print(f"{name:14} {num_rows:5} {listing:8.2f} {whole:9.2f}", flush=True)


if __name__ == "__main__":
    main()
