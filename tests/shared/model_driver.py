# SPDX-License-Identifier: Apache-2.0
"""A plain scheduler that drives a decoder through its Batch by hand: the tests' stand-in for the native one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blink.config import ModelConfig
from blink.kernels.batch import Batch, Header, Param
from blink.models.decoder import Decoder
from blink.models.weights.loader import load_model
from blink.plan.site import Bucket
from blink.region.layout import SAMPLING
from blink.runner.run import Runner
from blink.sampling_ranges import SAMPLING_RANGES

_FLOATS = {Param[name.upper()] for name in SAMPLING.names or () if SAMPLING[name].kind == "f"}
NEUTRAL_PARAMS: dict[Param, float] = {
    **{Param[name.upper()]: allowed.default for name, allowed in SAMPLING_RANGES.items()},
    Param.TEMPERATURE: 0.0,
    Param.NUM_LOGPROBS: -1,
}


def set_params(batch: Batch, slot: int, values: dict[Param, float]) -> None:
    """Write a slot's sampling parameters; those not given are neutral and greedy."""
    batch.params[slot].zero_()
    for param, value in {**NEUTRAL_PARAMS, **values}.items():
        (batch.params_f32 if param in _FLOATS else batch.params)[slot, param] = value


@dataclass
class Sequence:
    slot: int
    tokens: list[int]
    num_wanted: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)  # its window blocks, those behind its window included
    num_freed: int = 0  # of these, leading ones that are no longer its own


class Driver:
    """Runs sequences to their length, in steps that mix decoding and chunks of prompts.

    has_windows: layers with a window have blocks of their own, in which NaN takes the place of what no query sees.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        block_size: int = 16,
        num_slots: int = 8,
        max_len: int = 512,
        has_windows: bool = False,
    ) -> None:
        max_blocks = -(-max_len // block_size)
        num_blocks = num_slots * max_blocks
        self.decoder = decoder
        self.runner = Runner(decoder)
        self.block_size = block_size
        self.batch = Batch.allocate(
            max_tokens=4096,
            max_rows=num_slots,
            num_slots=num_slots,
            max_blocks=max_blocks,
            max_model_len=max_len,
            device=decoder.device,
            has_windows=has_windows,
            has_draft_head=decoder.head is not None,
        )
        # What no row owns must not be read: a wrong index shows as NaN, or fails.
        self.batch.block_tables.fill_(num_blocks + 7)
        num_windows = num_blocks if has_windows else 0
        self.kv_cache = decoder.allocate_kv_cache(num_blocks, block_size, num_slots, 0, num_windows)
        mixers = {index: layer.mixer.attention for index, layer in enumerate(decoder.spec.layers)}
        shown = [index for index, mixer in mixers.items() if mixer and mixer.window and mixer.kv_source is None]
        self.window_caches = [self.kv_cache[index] for index in shown if has_windows]
        self.free_windows = list(range(num_windows))
        self._poison(self.free_windows)
        for states in self.kv_cache.recurrent.values():  # which start at zero whatever was there
            states.states.fill_(torch.nan)
            states.inputs.fill_(torch.nan)
        self.free_blocks = list(range(num_blocks))
        random.Random(1).shuffle(self.free_blocks)
        self.sequences: list[Sequence] = []

    def add(self, prompt: list[int], num_wanted: int, params: dict[Param, float] | None = None) -> Sequence:
        sequence = Sequence(len(self.sequences), list(prompt), len(prompt) + num_wanted)
        self.sequences.append(sequence)
        set_params(self.batch, sequence.slot, {**(params or {}), Param.NUM_PROMPT_TOKENS: len(prompt)})
        self.batch.tokens[sequence.slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        return sequence

    def step(self, max_chunk: int = 1024) -> bool:
        """Run one step; chunks of prompts are at most max_chunk tokens. Return whether there was anything to run."""
        rows = self._choose_rows(max_chunk)
        if not rows:
            return False
        num_tokens = self._compose(rows)
        self.runner.forward(self.batch, self.kv_cache, Bucket(num_tokens, len(rows)))
        for row, (sequence, count) in enumerate(rows):
            sequence.num_computed += count
            self._free_behind_window(sequence)
            if sequence.num_computed == len(sequence.tokens):
                token = int(self.batch.sampled_tokens[row])
                self.batch.tokens[sequence.slot, len(sequence.tokens)] = token
                sequence.tokens.append(token)
        return True

    def run(self, max_chunk: int = 1024) -> list[list[int]]:
        while self.step(max_chunk):
            pass
        return [sequence.tokens for sequence in self.sequences]

    def compute_logits(self) -> torch.Tensor:
        """Run one step without sampling; return the logits of the sequences' last tokens."""
        rows = self._choose_rows(1024)
        return self.runner.compute_logits(self.batch, self.kv_cache, Bucket(self._compose(rows), len(rows)))

    def _free_behind_window(self, sequence: Sequence) -> None:
        """Give back the window blocks that no later query sees."""
        window = self.decoder.spec.cache_layout.window
        end = max(sequence.num_computed - window + 1, 0) // self.block_size if self.window_caches else 0
        freed = sequence.windows[sequence.num_freed : end]
        sequence.num_freed += len(freed)
        self._poison(freed)
        self.free_windows += freed

    def _poison(self, windows: list[int]) -> None:
        """Let what window blocks hold be found out if a query sees it."""
        for cache in self.window_caches:
            cache.cells[:, windows] = torch.nan

    def _choose_rows(self, max_chunk: int) -> list[tuple[Sequence, int]]:
        running = [s for s in self.sequences if len(s.tokens) < s.num_wanted]
        rows = [(s, min(len(s.tokens) - s.num_computed, max_chunk)) for s in running]
        return sorted(rows, key=lambda row: row[1] > 1)

    def _compose(self, rows: list[tuple[Sequence, int]]) -> int:
        batch, token = self.batch, 0
        for row, (sequence, count) in enumerate(rows):
            start, stop = sequence.num_computed, sequence.num_computed + count
            while len(sequence.blocks) * self.block_size < stop:
                batch.block_tables[sequence.slot, len(sequence.blocks)] = self.free_blocks[-1]
                sequence.blocks.append(self.free_blocks.pop())
                if self.free_windows:
                    batch.window_tables[sequence.slot, len(sequence.windows)] = self.free_windows[-1]
                    sequence.windows.append(self.free_windows.pop())
            for position in range(start, stop):
                batch.input_ids[token] = sequence.tokens[position]
                batch.positions[token] = position
                block, offset = divmod(position, self.block_size)
                batch.kv_slots[token] = sequence.blocks[block] * self.block_size + offset
                if sequence.windows:
                    batch.window_kv_slots[token] = sequence.windows[block] * self.block_size + offset
                token += 1
            batch.query_starts[row + 1] = token
            batch.context_lens[row] = stop
            batch.row_slots[row] = sequence.slot
        batch.header[Header.NUM_ROWS] = len(rows)
        batch.header[Header.NUM_TOKENS] = token
        batch.header[Header.NUM_DECODE_ROWS] = sum(count == 1 for _, count in rows)
        return token


def load_decoder(path: Path, device: str, dtype: torch.dtype, quantization: str = "auto") -> Decoder:
    """Load a checkpoint."""
    return load_model(ModelConfig(model=str(path), quantization=quantization), torch.device(device), dtype)


def compute_decoded_logits(decoder: Decoder, rows: int, *, decoding: bool = True) -> Tensor:
    """Return the logits of the token behind each of some prompts, as a decoding step computes them, or any other."""
    driver = Driver(decoder, num_slots=max(rows, 8))
    generator = torch.Generator().manual_seed(rows)
    for row in range(rows):
        driver.add(torch.randint(128, (row % 5 + 2,), generator=generator).tolist(), 1)
    for sequence in driver.sequences:  # all but the last token
        last = sequence.tokens.pop()
        Runner(decoder).forward(
            driver.batch, driver.kv_cache, Bucket(driver._compose([(sequence, len(sequence.tokens))]), 1)
        )
        sequence.num_computed = len(sequence.tokens)
        sequence.tokens.append(last)
    driver._compose([(sequence, 1) for sequence in driver.sequences])
    return (
        Runner(decoder)
        .compute_logits(driver.batch, driver.kv_cache, Bucket(rows, rows, decoding=decoding))
        .float()
        .cpu()
    )


def load(path: Path, **options: Any) -> Decoder:
    """Return a model of a folder, in float32 on the CPU; options: those of ModelConfig."""
    return load_model(ModelConfig(model=str(path), **options), torch.device("cpu"), torch.float32)


def logits(decoder: Decoder) -> Tensor:
    """Return the logits of two short prompts."""
    driver = Driver(decoder)
    driver.add([5, 60, 17, 33, 80, 4], 1)
    driver.add([99], 1)
    return driver.compute_logits()
