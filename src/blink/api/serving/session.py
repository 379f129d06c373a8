# SPDX-License-Identifier: Apache-2.0
"""One request: submits its sequences, gathers what they generate, and ends exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from blink.api.observe import metrics as names
from blink.api.serving.poller import Poller
from blink.errors import BlinkError
from blink.request.engine_tables import engine_of
from blink.request.planner import Plan
from blink.text.generation import Generation


class Responder(Protocol):
    """Who turns a request's output into a response."""

    def update(self, generations: Sequence[Generation]) -> None:
        """Take what these sequences have gained."""
        ...

    def close(self, error: BlinkError | None) -> None:
        """Learn that all sequences have ended, or that the request failed. Called once, last."""
        ...


class BackgroundResponder(Responder, Protocol):
    """Who tells the client at once that the output comes later."""

    @property
    def begun(self) -> bytes:
        """Return the body that is answered at once."""
        ...


AnyResponder = TypeVar("AnyResponder", bound=Responder)


class Session:
    """The n sequences of each prompt of one request."""

    def __init__(self, poller: Poller, plan: Plan, arrived: float, flow: int = 0) -> None:
        """Prepare a request that came at `arrived` (seconds, time.perf_counter) from the client `flow`."""
        self.prompts = plan.prompts
        self.generations = [planned.generation for planned in plan.sequences]
        self.arrived = arrived
        self.flow = flow
        self._poller = poller
        self._plan = plan
        self._submitted: list[int] = []
        self._engine = 0  # that of the first sequence
        self._changed: dict[Generation, None] = {}
        self._responder: Responder | None = None
        self.on_end: Callable[[BlinkError | None], None] | None = None  # called once when it has begun and ends

    def start(self, open_responder: Callable[[], AnyResponder]) -> AnyResponder:
        """Submit all sequences, or none; then, while the engine works, open the responder and return it.

        Raises:
            ClientLimitError: their client has as many as it may have.
            OverloadedError: the engine or this worker has no room for them.
        """
        self._poller.enter(self.flow, len(self.generations))
        try:
            for planned in self._plan.sequences:
                self._submitted.append(self._poller.table.submit(self, planned))
            engines = [engine_of(sequence) for sequence in self._submitted]
            responder = open_responder()
        except BaseException:
            self._cancel("abort")
            self._poller.leave(self.flow, len(self.generations))
            raise
        self._responder = responder
        step, self._engine = self._plan.num_choices, engines[0]
        for engine, planned in zip(engines[::step], self._plan.sequences[::step], strict=True):
            metrics = self._poller.metrics.of(engine)
            metrics.observe(names.PARAMS_N, planned.params.n)
            metrics.observe(names.PARAMS_MAX_TOKENS, planned.params.max_tokens or 0)
        return responder

    def note_change(self, generation: Generation) -> None:
        """Remember that a sequence has grown or ended."""
        self._changed[generation] = None

    def flush(self) -> None:
        """Pass on what has changed; end the request with its last sequence."""
        if self._responder is None or not self._changed:
            return
        changed = list(self._changed)
        self._changed.clear()
        self._responder.update(changed)
        for generation in self.generations:
            if generation.finish_reason is None:
                return
        self._end(None)

    def fail(self, error: BlinkError, reason: str = "error") -> None:
        """Cancel what is open and end the request with an error; nothing happens when it has ended."""
        self._cancel(reason)
        self._end(error)

    def _cancel(self, reason: str) -> None:
        for sequence in self._submitted:
            self._poller.table.cancel(sequence, reason)
        self._submitted.clear()

    def _end(self, error: BlinkError | None) -> None:
        responder, self._responder = self._responder, None
        if responder is not None:
            self._poller.leave(self.flow, len(self.generations))
            longest = max(generation.num_tokens for generation in self.generations)
            self._poller.metrics.of(self._engine).observe(names.MAX_GENERATION_TOKENS, longest)
            responder.close(error)
            if self.on_end is not None:
                self.on_end(error)
