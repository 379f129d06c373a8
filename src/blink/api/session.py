# SPDX-License-Identifier: Apache-2.0
"""One request: submits its sequences, gathers what they generate, and ends exactly once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Protocol

from blink.api import metrics as names
from blink.api.poller import Poller
from blink.errors import BlinkError
from blink.sampling_params import SamplingParams
from blink.text.generation import Generation
from blink.text.prompt import Prompt
from blink.text.tokenizer import Tokenizer

_SEED_MASK = 2**64 - 1


class Listener(Protocol):
    """Who turns a request's output into a response."""

    def update(self, generations: Sequence[Generation]) -> None:
        """Take what these sequences have gained."""
        ...

    def close(self, error: BlinkError | None) -> None:
        """Learn that all sequences have ended, or that the request failed. Called once, last."""
        ...


class Session:
    """The n sequences of each prompt of one request; sequence i of a prompt uses seed + i."""

    def __init__(
        self,
        poller: Poller,
        tokenizer: Tokenizer,
        jobs: Sequence[tuple[Prompt, SamplingParams]],
        eos_token_ids: tuple[int, ...],
        arrived: float,
    ) -> None:
        """Plan the sequences of a request that came at `arrived` (seconds, time.perf_counter)."""
        self.prompts = [prompt for prompt, _ in jobs]
        self.generations: list[Generation] = []
        self._poller = poller
        self._eos = eos_token_ids
        self.arrived = arrived
        self._jobs = jobs
        self._open: dict[int, Generation] = {}
        self._changed: dict[Generation, None] = {}
        self._listener: Listener | None = None
        for _, params in jobs:
            for _ in range(params.n):
                self.generations.append(Generation(len(self.generations), tokenizer, params, eos_token_ids))

    def start(self, listener: Listener) -> None:
        """Submit all sequences, or none.

        Raises:
            OverloadedError: the engine or this worker has no room for them.
        """
        self._poller.check_room(len(self.generations))
        generations = iter(self.generations)
        try:
            for prompt, params in self._jobs:
                base = secrets.randbits(64) if params.seed is None else params.seed
                for place in range(params.n):
                    self._submit(next(generations), prompt, params, (base + place) & _SEED_MASK)
        except BlinkError:
            self._cancel_open("abort")
            raise
        self._listener = listener
        for _, params in self._jobs:
            self._poller.metrics.observe(names.PARAMS_N, params.n)
            self._poller.metrics.observe(names.PARAMS_MAX_TOKENS, params.max_tokens)

    def _submit(self, generation: Generation, prompt: Prompt, params: SamplingParams, seed: int) -> None:
        sequence = self._poller.submit(self, generation, prompt, params, seed, self._eos)
        self._open[sequence] = generation

    def note_change(self, generation: Generation) -> None:
        """Remember that a sequence has grown or ended."""
        self._changed[generation] = None

    def flush(self) -> None:
        """Pass on what has changed; end the request with its last sequence."""
        if self._listener is None or not self._changed:
            return
        changed = list(self._changed)
        self._changed.clear()
        self._listener.update(changed)
        for generation in self.generations:
            if generation.finish_reason is None:
                return
        self._end(None)

    def fail(self, error: BlinkError, reason: str = "error") -> None:
        """Cancel what is open and end the request with an error; nothing happens when it has ended."""
        self._cancel_open(reason)
        self._end(error)

    def _cancel_open(self, reason: str) -> None:
        for sequence in self._open:
            self._poller.cancel(sequence, reason)
        self._open.clear()

    def _end(self, error: BlinkError | None) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close(error)
