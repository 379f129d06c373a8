# SPDX-License-Identifier: Apache-2.0
"""An engine of random weights, in a process of its own, whose sequences write given texts.

Its steps do all that they do otherwise. Then the token that a row sampled is replaced by the one that its text has
there. So texts of a real model decide which drafts are accepted, and the scheduler finds the drafts itself. A draft
head of random weights is right as often as its `shares` say.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from engine_client import connect
from torch import Tensor

from blink.config import EngineConfig
from blink.engine import guessing
from blink.engine.boot import create_engine
from blink.kernels.batch import Batch
from blink.kernels.guesses import FIRST_GUESS, TEXT_LENGTH
from blink.kernels.layer_cache import LayerCache
from blink.kernels.sampling import sample
from blink.link.client import EngineClient
from blink.plan.site import Bucket
from blink.runner import run
from blink.runner.eagle import EagleDrafter

_SEED, _STRIDE = 7, 37  # of the luck of heads; it is another for each slot


@dataclass(frozen=True)
class Script:
    """Texts, each a prompt with its answer: a sequence whose prompt begins with the token i writes the text i."""

    texts: Sequence[Sequence[int]]
    shares: Sequence[float] = ()  # of a head's drafts that are right up to each place

    def tabulate(self) -> Tensor:
        """Return the texts, int32 [texts, tokens]; 0 behind a text's end."""
        table = torch.zeros(len(self.texts), max(map(len, self.texts)) + 1 + len(self.shares), dtype=torch.int32)
        for index, text in enumerate(self.texts):
            table[index, : len(text)] = torch.tensor(text)
        return table


class Prompter:
    """Replaces what steps sample and what a head guesses."""

    def __init__(self, script: Script, device: str) -> None:
        self._table = script.tabulate().to(device)
        self._shares = torch.tensor([*script.shares], device=device)
        draw = torch.Generator().manual_seed(_SEED)
        self._luck = torch.rand(self._table.shape[1], generator=draw).to(device)  # by a text's length and slot

    def sample(self, logits: Tensor, batch: Batch, num_rows: int, *, deterministic: bool = False) -> None:
        """Sample, then write what the texts have."""
        sample(logits, batch, num_rows, deterministic=deterministic)
        texts = self._find_texts(batch, batch.row_slots[:num_rows])
        lengths = batch.context_lens[:num_rows].long().clamp(0, self._table.shape[1] - 1)
        batch.sampled_tokens[:num_rows] = self._table[texts, lengths]

    def guess(self, batch: Batch) -> None:
        """Write drafts of all slots: those of the texts, as far as luck has it, and then another token."""
        count, last = len(self._shares), self._table.shape[1] - 1
        drafts = batch.head_drafts
        lengths = drafts[:, TEXT_LENGTH].long().clamp(0, last - count)
        places = lengths[:, None] + torch.arange(count, device=drafts.device)
        slots = torch.arange(len(drafts), device=drafts.device)
        tokens = self._table[self._find_texts(batch, slots)[:, None], places]
        luck = self._luck[(lengths + _STRIDE * slots) % len(self._luck)]
        is_wrong = luck[:, None] >= self._shares
        drafts[:, FIRST_GUESS : FIRST_GUESS + count] = tokens ^ is_wrong.to(torch.int32)

    def _find_texts(self, batch: Batch, slots: Tensor) -> Tensor:
        return batch.tokens[slots.long().clamp(0, len(batch.tokens) - 1), 0].long().clamp(0, len(self._table) - 1)


class ScriptedDrafter(EagleDrafter):
    """A head that runs as it does, and guesses what the script says."""

    prompter: Prompter

    def read(self, batch: Batch, cache: LayerCache, size: Bucket) -> None:
        """Read a step, and write the script's drafts."""
        super().read(batch, cache, size)
        if not size.skips_guesses:
            self.prompter.guess(batch)


def serve(config: EngineConfig, script: Script) -> None:
    """Run an engine until SIGTERM."""
    prompter = Prompter(script, config.device)
    run.sample = prompter.sample
    if script.shares:
        ScriptedDrafter.prompter = prompter
        guessing.EagleDrafter = ScriptedDrafter
    engine = create_engine(config)
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    engine.run()


@contextmanager
def run_scripted(config: EngineConfig, script: Script) -> Iterator[tuple[EngineClient, int]]:
    """Serve texts; yield a client and the process's id."""
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(config, script))
    process.start()
    assert process.pid is not None
    try:
        client = connect(config.region, is_alive=process.is_alive)
        yield client, process.pid
        client.close()
    finally:
        process.terminate()
        process.join(20)
        process.kill()
