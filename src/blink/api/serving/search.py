# SPDX-License-Identifier: Apache-2.0
"""A request whose answers are searched for: each step of its search is a batch of sequences of one token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Scope

from blink.api.http.http1 import writer_of
from blink.api.serving.poller import Poller
from blink.api.serving.session import Session
from blink.api.serving.stream import NonStreamingBody
from blink.beam_search_params import BeamSearchParams
from blink.errors import BadRequestError, BlinkError, ClientGoneError
from blink.link.client import RegionInfo
from blink.region.layout import FinishReason
from blink.request.beam_search import Beam, Steps, Tokens, position_of
from blink.request.planner import Plan
from blink.text.generation import Generation, TokenLogprob

PlanStep = Callable[[list[Tokens]], Awaitable[Plan]]


def check_search(params: BeamSearchParams, num_prompts: int, engine: RegionInfo) -> None:
    """Refuse a search that this engine would not do in bounded work.

    Raises:
        BadRequestError: it has too many beams, or each step would compute all of the prompt.
    """
    if not engine.prefix_caching:
        raise BadRequestError(
            "Beam search needs the prefix cache, which this server has switched off.", "use_beam_search"
        )
    if params.beam_width * num_prompts > engine.max_sequences or 2 * params.beam_width > engine.vocab_size:
        raise BadRequestError(f"One request may search with at most {engine.max_sequences} beams.", "n")


class BeamSession:
    """Run the steps of a session's search, in the room of as many sequences as it has beams."""

    def __init__(self, poller: Poller, session: Session, num_beams: int) -> None:
        self.arrived = session.arrived
        self.flow = session.flow
        self._poller = poller
        self._session = session
        self._num_beams = num_beams
        self._open: list[int] = []
        self._generations: list[Generation] = []
        self._ended: asyncio.Future[None] | None = None
        self._error: BlinkError | None = None
        self._is_begun = False

    async def run(self, steps: Steps, plan: PlanStep, scope: Scope) -> list[list[Beam]]:
        """Return the best sequences of each prompt.

        Raises:
            ClientLimitError, OverloadedError: there is no room, as for any other request.
            BlinkError: the engine fails, or the client has gone.
        """
        self._poller.enter(self.flow, self._num_beams)
        try:
            with writer_of(scope).on_disconnect(lambda: self.fail(ClientGoneError(), "abort")):
                return await self._run(steps, plan)
        except BlinkError as error:
            self._error = error
            raise
        finally:
            self._cancel("abort")
            self._poller.leave(self.flow, self._num_beams)
            if self._session.on_end is not None:
                self._session.on_end(self._error)

    def note_change(self, generation: Generation) -> None:
        """Leave the token with its sequence until the step ends."""

    def flush(self) -> None:
        """End the step with its last sequence."""
        is_over = all(generation.finish_reason is not None for generation in self._generations)
        if is_over and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def fail(self, error: BlinkError, reason: str = "error") -> None:
        """End the search with an error."""
        self._error = self._error or error
        self._cancel(reason)
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _run(self, steps: Steps, plan: PlanStep) -> list[list[Beam]]:
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(await self._score(await plan(wanted)))
        except StopIteration as end:
            return end.value

    async def _score(self, plan: Plan) -> Sequence[TokenLogprob]:
        if self._error is not None:  # since the last step
            raise self._error
        self.arrived = time.perf_counter()
        self._generations = [planned.generation for planned in plan.sequences]
        self._ended = asyncio.get_running_loop().create_future()
        for planned in plan.sequences:
            self._open.append(self._poller.table.submit(self, planned))
        await self._ended
        self._open.clear()
        if not self._is_begun:  # the first step has the prompts alone
            self._is_begun = True
            num_choices = len(self._session.generations) // len(self._generations)
            for shown, scored in zip(self._session.generations[::num_choices], self._generations, strict=True):
                shown.cached_tokens = scored.cached_tokens
        return [position_of(generation) for generation in self._generations]

    def _cancel(self, reason: str) -> None:
        for sequence in self._open:
            self._poller.table.cancel(sequence, reason)
        self._open.clear()


def write_beams(found: Sequence[Sequence[Beam]], session: Session, num_logprobs: int, body: NonStreamingBody) -> None:
    """Put each prompt's best sequences into the session's, token by token, as if they had been sampled."""
    num_choices = len(session.generations) // len(session.prompts)
    chosen = [beam for beams in found for beam in beams[:num_choices]]
    for generation, beam in zip(session.generations, chosen, strict=True):
        end = FinishReason.LENGTH if beam.end is None else FinishReason.STOP
        for place, entry in enumerate(beam.logprobs, 1):
            for token, logprob in entry.top[:num_logprobs]:
                generation.add_top_logprob(token, logprob)
            generation.add_token(entry.token, entry.logprob, end if place == len(beam.logprobs) else 0)
            body.take(generation)
