# SPDX-License-Identifier: Apache-2.0
"""Times sampling with every row constrained by a schema of its own, against the same rows unconstrained.

The vocabulary has Llama-3's 128,256 tokens: those of the default model, repeated, or those of a file of token bytes
(npz with starts and text). One step is done again and again, or texts are written by random tokens of what is allowed:
about one in eight ends a string where it may, and a text that is complete begins anew.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blink.config import FrontendConfig
from blink.grammar.compiler import compile_structured
from blink.kernels.batch import Batch, Header, Param
from blink.kernels.gpu.constraint import find_allowed
from blink.kernels.gpu.sampling import sample
from blink.kernels.operands import INVALID_LOGITS
from blink.structured_outputs import StructuredOutputsParams

_VOCAB, _PROMPT, _LENGTH = 128256, 200, 1024
_CALLS = 10  # in one graph
_STEP_US = 4270  # of Llama-3-8B with 32 rows on an H200
_MEMBERS = ("name", "email", "city", "title", "summary", "comment")


class Vocabulary(NamedTuple):
    """The bytes of all tokens."""

    starts: np.ndarray
    text: np.ndarray

    def single(self, byte: int) -> int:
        """Return a token of one byte."""
        starts = self.starts
        alone = np.flatnonzero((np.diff(starts) == 1) & (self.text[starts[:-1]] == byte))
        return int(alone[0])


def read_vocabulary(path: Path | None) -> Vocabulary:
    """Return the vocabulary, repeated until it is long enough."""
    if path is not None:
        known = np.load(path)
        starts, text = known["starts"], known["text"]
    else:
        from blink.text.assets import load_assets
        from blink.text.vocabulary import list_vocabulary

        tokenizer = load_assets(FrontendConfig()).tokenizer
        vocabulary = list_vocabulary(tokenizer, tokenizer.vocab_size)
        starts, text = vocabulary.starts, vocabulary.text
    lengths = np.resize(np.diff(starts.astype(np.int64)), _VOCAB)
    tiled = np.concatenate([text] * (_VOCAB // (len(starts) - 1) + 1))[: -(-lengths.sum() // 8) * 8]
    return Vocabulary(np.concatenate([[0], lengths.cumsum()]).astype(np.int32), tiled)


def strings_schema(row: int, num_more: int = 0, **limits: int) -> dict[str, Any]:
    """Return an object of strings."""
    members: dict[str, Any] = {"key0": {"type": "string"} | limits}
    members |= {f"{name}{row}": {"type": "string"} for name in _MEMBERS}
    members |= {f"another_member_{row}_{each}": {"type": "string"} for each in range(num_more)}
    return {"type": "object", "properties": members, "required": list(members)}


def record_schema(row: int, **limits: int) -> dict[str, Any]:
    """Return an object of what tools and extraction ask for; limits: of its strings."""
    text = {"type": "string"} | limits
    line = {
        "type": "object",
        "properties": {
            "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "note": text,
            "count": {"type": "integer"},
        },
        "required": ["sku", "note", "count"],
    }
    members = {
        f"name{row}": text,
        "status": {"enum": ["open", "closed", "waiting"]},
        "score": {"type": "number"},
        "is_urgent": {"type": "boolean"},
        "tags": {"type": "array", "items": text},
        "lines": {"type": "array", "items": line},
        "summary": text,
    }
    return {"type": "object", "properties": members, "required": list(members)}


# Of a string whose length is bounded, each character leads to another place.
_CASES: dict[str, tuple[Callable[[int], dict[str, Any]] | None, str]] = {
    "unconstrained": (None, ""),
    "few tokens": (strings_schema, "{"),
    "string, same place": (strings_schema, '{"key0":"some'),
    "string, new place": (lambda row: strings_schema(row, maxLength=400), '{"key0":"some'),
    "same, large": (lambda row: strings_schema(row, 40, maxLength=400), '{"key0":"some'),
}


def make_batch(num_rows: int, schemas: list[dict[str, Any]] | None, vocabulary: Vocabulary) -> Batch:
    """Make a batch whose rows have generated nothing; None: unconstrained."""
    batch = Batch.allocate(
        max_tokens=1, max_rows=num_rows, num_slots=num_rows, max_blocks=1, max_model_len=_LENGTH, device="cuda",
        num_automata=num_rows, vocab_size=_VOCAB, vocab_bytes=len(vocabulary.text),
    )  # fmt: skip
    batch.token_starts.copy_(torch.from_numpy(vocabulary.starts))
    batch.token_text.copy_(torch.from_numpy(vocabulary.text))
    batch.params_f32[:, Param.TOP_P] = batch.params_f32[:, Param.REPETITION_PENALTY] = 1.0
    batch.params_f32[:, Param.TEMPERATURE] = 1.0
    batch.params[:, Param.NUM_LOGPROBS] = -1
    batch.params[:, Param.NUM_PROMPT_TOKENS] = _PROMPT
    batch.header[Header.NUM_ROWS] = num_rows
    batch.row_slots.copy_(torch.arange(num_rows))
    batch.params[:, Param.SEED_LOW] = batch.row_slots
    batch.context_lens.fill_(_PROMPT)
    batch.automaton_places.fill_(-1)
    for row, schema in enumerate(schemas or []):
        data = compile_structured(StructuredOutputsParams(json=schema)).data
        batch.automata[row, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
        batch.params[row, Param.AUTOMATON] = row + 1
    return batch


def write(batch: Batch, text: str, vocabulary: Vocabulary) -> None:
    """Let all rows generate the bytes of a text, one token each."""
    num_rows = batch.context_lens.shape[0]
    find_allowed(batch, num_rows, _VOCAB)
    for byte in text.encode():
        batch.tokens[:, int(batch.context_lens[0])] = vocabulary.single(byte)
        batch.context_lens.add_(1)
        find_allowed(batch, num_rows, _VOCAB)


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of several calls."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Return how long one call takes, the median of so many replays."""
    found = list[float]()
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / _CALLS)
    return float(np.median(found))


def make_logits(num_rows: int, vocabulary: Vocabulary) -> Tensor:
    """Return logits by which any token may come, and one in eight ends a string."""
    starts = vocabulary.starts
    first = vocabulary.text[np.minimum(starts[:-1], len(vocabulary.text) - 1)]
    quotes = (np.diff(starts) == 1) & (first == ord('"'))
    logits = torch.randn(num_rows, _VOCAB, device="cuda")
    logits[:, torch.from_numpy(quotes).cuda()] += math.log(_VOCAB / 7 / quotes.sum())
    return logits.bfloat16()


def measure_texts(batch: Batch, logits: Tensor, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Let random texts be written; return the microseconds of each step and how many rows it made lists for."""
    num_rows = logits.shape[0]
    graph = capture(lambda: sample(logits, batch, num_rows))
    places = batch.automaton_places.view(num_rows, 2, -1)
    rows = torch.arange(num_rows, device="cuda")
    lists, times, moved = torch.zeros_like(rows), list[float](), list[int]()
    for _ in range(num_steps):
        times.append(replay_us(graph, 1))
        now = places[rows, (batch.context_lens - _PROMPT).long() % 2, 1] >> 24  # AutomatonPlace.list
        moved.append(int((now != lists).sum()))
        lists = now
        tokens = batch.sampled_tokens[:num_rows]
        assert not bool((tokens == INVALID_LOGITS).any()), "a text has come to where it cannot go on"
        is_over = (tokens < 0) | (batch.context_lens == _LENGTH - 1)
        batch.tokens[rows, batch.context_lens.long()] = tokens.clamp(min=0)
        batch.context_lens.copy_(torch.where(is_over, _PROMPT, batch.context_lens + 1))
        places[is_over] = -1
        lists[is_over] = 0
    return np.array(times), np.array(moved)


def main() -> None:
    """Print medians in microseconds, replayed from a CUDA graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vocabulary", type=Path, nargs="?", help="npz with starts and text of a vocabulary")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=300, help="of texts that are written")
    options = parser.parse_args()
    vocabulary = read_vocabulary(options.vocabulary)
    print(f"{'text':22} {'rows':>5} {'list us':>8} {'sample us':>9} {'% of step':>9}")
    for num_rows in options.rows:
        measure_rows(num_rows, vocabulary, options.steps)


def measure_rows(num_rows: int, vocabulary: Vocabulary, num_steps: int) -> None:
    """Print all cases with so many rows."""
    logits, plain = make_logits(num_rows, vocabulary), 0.0
    for name, (schema, text) in _CASES.items():
        batch = make_batch(num_rows, [schema(row) for row in range(num_rows)] if schema else None, vocabulary)
        write(batch, text, vocabulary)
        listing = replay_us(capture(lambda batch=batch: find_allowed(batch, num_rows, _VOCAB)), 20)
        whole = replay_us(capture(lambda batch=batch: sample(logits, batch, num_rows)), 20)
        plain = plain or whole
        print(f"{name:22} {num_rows:5} {listing:8.2f} {whole:9.2f} {100 * (whole - plain) / _STEP_US:9.2f}", flush=True)
    for name, limits in {"texts": {}, "texts, bounded": {"maxLength": 200}}.items():
        batch = make_batch(num_rows, [record_schema(row, **limits) for row in range(num_rows)], vocabulary)
        times, moved = measure_texts(batch, logits, num_steps)
        whole, most = float(times.mean()), np.percentile(times, 99)
        line = f"{name:22} {num_rows:5} {'':8} {whole:9.2f} {100 * (whole - plain) / _STEP_US:9.2f}"
        print(f"{line}  mean; p50 {np.median(times):.1f} p99 {most:.1f}, {moved.mean():.1f} new lists", flush=True)


if __name__ == "__main__":
    main()
