# SPDX-License-Identifier: Apache-2.0
"""Search for the likeliest sequences, one token of all beams a step: the prefix cache has what is before it.

The search says what is to be scored and is told how likely tokens are; `LLM` and a frontend run its steps their way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from blink.beam_search_params import BeamSearchParams
from blink.errors import BlinkError
from blink.sampling_params import SamplingParams
from blink.text.generation import Generation, TokenLogprob

Tokens = npt.NDArray[np.int32]
# Yields the sequences whose next tokens are to be scored, takes one position for each, returns each prompt's best.
Steps = Generator[list[Tokens], Sequence[TokenLogprob], "list[list[Beam]]"]


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence. tokens: the prompt's and those behind it; logprobs: of the latter; end: the token that ended it."""

    tokens: Tokens
    logprobs: tuple[TokenLogprob, ...] = ()
    cum_logprob: float = 0.0
    score: float = 0.0
    end: int | None = None


def scoring_params(params: BeamSearchParams, asked: SamplingParams | None = None) -> SamplingParams:
    """Return the parameters of one step; `asked` has the request's class, its urgency, and the logprobs it shows."""
    asked = SamplingParams() if asked is None else asked
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=max(2 * params.beam_width, asked.logprobs or 0),
        ignore_eos=True,
        detokenize=False,
        priority=asked.priority,
        best_effort=asked.best_effort,
        tpot_target_ms=asked.tpot_target_ms,
    )


def search(prompts: Sequence[Tokens], params: BeamSearchParams, ends: Sequence[int]) -> Steps:
    """Search for the sequences of each prompt that are the likeliest; `ends` are the tokens that end a text."""
    searches = [_Search(prompt, params, ends) for prompt in prompts]
    for _ in range(params.max_tokens):
        positions = iter((yield [beam.tokens for each in searches for beam in each.beams]))
        for each in searches:
            each.advance(list(islice(positions, len(each.beams))))
        if not any(each.beams for each in searches):
            break
    return [each.best for each in searches]


def position_of(generation: Generation) -> TokenLogprob:
    """Return what a step's sequence tells of its next token.

    Raises:
        BlinkError: nothing: its logits are no numbers.
    """
    logprobs = generation.take().logprobs
    if not logprobs:
        raise BlinkError("The model gave no valid logits to the beam search.")
    return logprobs[0]


def run_steps(steps: Steps, score: Callable[[list[Tokens]], Sequence[TokenLogprob]]) -> list[list[Beam]]:
    """Run a search in the calling thread; `score` returns one position for each sequence."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(score(wanted))
    except StopIteration as end:
        return end.value


class _Search:
    """The search of one prompt."""

    def __init__(self, prompt: Tokens, params: BeamSearchParams, ends: Sequence[int]) -> None:
        self.beams = [Beam(np.asarray(prompt, np.int32))]
        self._params = params
        self._ends = () if params.ignore_eos else ends
        self._completed: list[Beam] = []

    @property
    def best(self) -> list[Beam]:
        """Return the best sequences, complete or not."""
        return self._cut([*self._completed, *self.beams])

    def advance(self, positions: Sequence[TokenLogprob]) -> None:
        """Go on from each beam with what is likely behind it, and keep the best."""
        grown: list[tuple[float, Beam, int, float, TokenLogprob]] = []
        for beam, position in zip(self.beams, positions, strict=True):
            for token, logprob in position.top[: 2 * self._params.beam_width]:
                if token in self._ends:
                    self._completed.append(self._grow(beam, token, logprob, position, is_end=True))
                else:
                    score = self._score(beam.cum_logprob + logprob, len(beam.tokens) + 1)
                    grown.append((score, beam, token, logprob, position))
        self._completed = self._cut(self._completed)
        grown.sort(key=lambda entry: entry[0], reverse=True)
        is_over = self._params.early_stopping and len(self._completed) == self._params.beam_width
        kept = [] if is_over else grown[: self._params.beam_width]
        self.beams = [self._grow(beam, token, logprob, position) for _, beam, token, logprob, position in kept]

    def _grow(self, beam: Beam, token: int, logprob: float, position: TokenLogprob, *, is_end: bool = False) -> Beam:
        is_shown = not is_end or self._params.include_stop_str_in_output
        total = beam.cum_logprob + logprob
        return Beam(
            np.append(beam.tokens, np.int32(token)) if is_shown else beam.tokens,
            (*beam.logprobs, TokenLogprob(token, logprob, position.top)),
            total,
            self._score(total, len(beam.tokens) + (not is_end)),
            token if is_end else None,
        )

    def _score(self, logprob: float, length: int) -> float:
        """Return the logprob by length; a token that ends a text is no part of its length."""
        return logprob / max(length, 1) ** self._params.length_penalty

    def _cut(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=attrgetter("score"), reverse=True)[: self._params.beam_width]
