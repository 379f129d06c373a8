# SPDX-License-Identifier: Apache-2.0
"""The sequences that the engine has: submits them, turns completions into text, ends each exactly once.

The only reader of completions, for a frontend and for `LLM`. No task, future, lock or object per token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from blink.errors import LOST_REQUEST, BlinkError, EngineUnavailableError
from blink.link.client import EngineClient
from blink.region.layout import COMPLETION, CONSTANTS, VECTOR_CQE, CqeKind, FinishReason, RejectCode, StructReader
from blink.request.planner import PlannedSequence
from blink.text.generation import FINISH_NAMES, Generation

_READER = StructReader(COMPLETION, ("sequence", "time_ns", "token", "logprob", "kind", "finish_reason", "rank"))
_ADMITTED, _TOKEN, _TOP_LOGPROB = int(CqeKind.ADMITTED), int(CqeKind.TOKEN), int(CqeKind.TOP_LOGPROB)
_PROMPT_LOGPROB, _VECTOR = int(CqeKind.PROMPT_LOGPROB), int(CqeKind.VECTOR)
_PREDICTED_BITS = CONSTANTS["predicted_bits"]
_FINISHED, _REJECTED = int(CqeKind.FINISHED), int(CqeKind.REJECTED)

Completions = npt.NDArray[np.void]  # dtype layout.COMPLETION

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """The request behind a sequence."""

    arrived: float  # seconds, time.perf_counter
    flow: int  # the client it is from; 0 for none

    def note_change(self, generation: Generation) -> None:
        """Remember that a sequence has grown or ended."""
        ...

    def flush(self) -> None:
        """Pass on what has changed since the last call; comes once behind each batch of completions."""
        ...

    def fail(self, error: BlinkError, reason: str = "error") -> None:
        """End the request with an error, and cancel its other sequences."""
        ...


class OpenSequence:
    """A sequence that the engine has: whose it is and, for the observer, when it did what."""

    __slots__ = (
        "admitted",
        "first",
        "generation",
        "is_waiting",
        "last_ns",
        "num_preemptions",
        "num_prompt_tokens",
        "owner",
    )

    def __init__(self, owner: Owner, generation: Generation, num_prompt_tokens: int) -> None:
        self.owner = owner
        self.generation = generation
        self.num_prompt_tokens = num_prompt_tokens
        self.is_waiting = True
        self.admitted: float | None = None  # seconds, time.perf_counter
        self.first: float | None = None
        self.last_ns = 0
        self.num_preemptions = 0


class Observer:
    """Learns what happens to sequences; this one lets it pass."""

    def note_admission(self, opened: OpenSequence) -> None:
        """Learn that the engine runs a sequence, the first time."""

    def note_token(self, opened: OpenSequence, time_ns: int) -> None:
        """Learn that a sequence got a token, at a time of the engine's clock."""

    def note_end(self, opened: OpenSequence, reason: str) -> None:
        """Learn that a sequence has left the table."""


class SequenceTable:
    """Map the engine's sequences to their generations and owners. Use from one thread at a time."""

    def __init__(
        self,
        client: EngineClient,
        observer: Observer,
        defer: Callable[[Callable[[], None]], object] = lambda call: call(),
    ) -> None:
        """Use a client; defer: call something soon, when what was written before has left."""
        self.client = client
        self.num_waiting = 0
        self._defer = defer
        self._observer = observer
        self._open: dict[int, OpenSequence] = {}

    @property
    def num_open(self) -> int:
        """Return how many sequences are with the engine."""
        return len(self._open)

    def submit(self, owner: Owner, planned: PlannedSequence) -> int:
        """Give a sequence to the engine; return its id.

        Raises:
            OverloadedError: the queue pair is full.
            EngineUnavailableError: no engine is ready.
        """
        prompt = planned.prompt
        sequence = self.client.submit(
            prompt.tokens,
            planned.params,
            seed=planned.seed,
            eos_token_ids=planned.eos_token_ids,
            block_hashes=prompt.block_hashes,
            origin=prompt.origin,
            flow=owner.flow,
            automaton=planned.automaton,
            prediction=planned.prediction,
        )
        self._open[sequence] = OpenSequence(owner, planned.generation, prompt.num_tokens)
        self.num_waiting += 1
        planned.generation.open()
        return sequence

    def cancel(self, sequence: int, reason: str) -> None:
        """Take a sequence away from the engine, if it still has it."""
        if sequence in self._open:
            self._remove(sequence, reason)
            self.client.cancel(sequence)

    def fail_all(self, error: BlinkError) -> None:
        """End all requests with an error."""
        for owner in {opened.owner: None for opened in list(self._open.values())}:
            owner.fail(error)

    def tick(self) -> str | None:
        """Renew the lease; when the engine is lost, end all requests and return why. Call four times a second."""
        lost = self.client.tick()
        if lost is not None:
            self.fail_all(EngineUnavailableError(f"{LOST_REQUEST}: {lost}."))
        return lost

    def drain(self) -> None:
        """Take all completions that have arrived to their owners."""
        rows = self.client.drain()
        info = self.client.info
        if info is not None and info.vector_width:
            rows = self._take_vectors(rows)
        owners: dict[Owner, None] = {}
        begun: dict[Owner, None] = {}
        find, note_token = self._open.get, self._observer.note_token
        for sequence, time_ns, token, logprob, kind, reason, rank in _READER.read(rows):
            opened = find(sequence)
            if opened is None:  # cancelled: its last completions are nobody's
                continue
            owners[opened.owner] = None
            try:
                if kind == _TOKEN:
                    note_token(opened, time_ns)
                    if rank:
                        _note_rank(opened, rank)
                    self._add_token(sequence, opened, token, logprob, reason)
                    if opened.generation.num_tokens == 1:
                        begun[opened.owner] = None
                elif kind == _TOP_LOGPROB:
                    opened.generation.add_top_logprob(token, logprob)
                elif kind == _PROMPT_LOGPROB:
                    opened.generation.add_prompt_logprob(token, logprob)
                else:
                    opened.num_preemptions += rank
                    self._note_change(sequence, opened, kind, token, reason)
            except Exception as error:
                logger.exception("a completion could not be handled")
                opened.owner.fail(BlinkError(f"Internal error: {type(error).__name__}."))
        if begun:  # a first token does not wait until those of all others are written
            _flush(begun)
            self._defer(partial(_flush, [owner for owner in owners if owner not in begun]))
        else:
            _flush(owners)

    def _take_vectors(self, rows: Completions) -> Completions:
        """Give parts of vectors to their generations, all of a sequence's at once; return the other completions."""
        is_part = rows["kind"] == _VECTOR
        if not is_part.any():
            return rows
        parts = rows[is_part].view(VECTOR_CQE)
        sequences = parts["sequence"]
        starts = [0, *np.flatnonzero(sequences[1:] != sequences[:-1]) + 1]
        for start, end in zip(starts, [*starts[1:], len(parts)], strict=True):
            opened = self._open.get(int(sequences[start]))
            if opened is None:
                continue
            try:
                opened.generation.add_values(int(parts["index"][start]), parts["values"][start:end].ravel())
            except ValueError as error:
                logger.exception("a vector could not be taken")
                opened.owner.fail(BlinkError(f"Internal error: {type(error).__name__}."))
        return rows[~is_part]

    def _add_token(self, sequence: int, opened: OpenSequence, token: int, logprob: float, reason: int) -> None:
        generation = opened.generation
        generation.add_token(token, logprob, reason)
        opened.owner.note_change(generation)
        if generation.finish_reason is not None:
            self._remove(sequence, generation.finish_reason)
            if not reason:  # a stop string: the engine does not know yet
                self.client.cancel(sequence)

    def _note_change(self, sequence: int, opened: OpenSequence, kind: int, token: int, reason: int) -> None:
        generation = opened.generation
        if kind == _ADMITTED:
            if opened.is_waiting:  # after a preemption it is admitted again
                opened.is_waiting = False
                self.num_waiting -= 1
                generation.cached_tokens = token
                self._observer.note_admission(opened)
        elif kind == _FINISHED:
            generation.finish(FINISH_NAMES[FinishReason(reason)] if reason else "abort")
            self._remove(sequence, generation.finish_reason or "abort")
            opened.owner.note_change(generation)
        elif kind == _REJECTED:
            self._remove(sequence, "error")
            opened.owner.fail(_rejection(token))

    def _remove(self, sequence: int, reason: str) -> None:
        opened = self._open.pop(sequence)
        self.num_waiting -= opened.is_waiting
        self._observer.note_end(opened, reason)


def _note_rank(opened: OpenSequence, rank: int) -> None:
    """Note what a token's completion tells beside the token: preemptions before it, and its place in a prediction."""
    opened.num_preemptions += rank >> _PREDICTED_BITS
    if predicted := rank & ((1 << _PREDICTED_BITS) - 1):
        opened.generation.note_prediction(predicted)


def _flush(owners: Iterable[Owner]) -> None:
    """Let requests pass on what has changed."""
    for owner in owners:
        try:
            owner.flush()
        except Exception as error:
            logger.exception("a request could not be answered")
            owner.fail(BlinkError(f"Internal error: {type(error).__name__}."))


def _rejection(code: int) -> BlinkError:
    if code == RejectCode.DRAINING:
        return EngineUnavailableError("The engine is shutting down.")
    if code == RejectCode.ADAPTER:
        return EngineUnavailableError("The adapter has just left the engine's memory. Retry.")
    return BlinkError(f"The engine rejected the request: {RejectCode(code).name}.")
