# SPDX-License-Identifier: Apache-2.0
"""Search for the likeliest sequences, one token of all beams at a time: the prefix cache has what is before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blink.outputs import BeamSearchOutput, BeamSearchSequence, PositionLogprobs
from blink.sampling_params import BeamSearchParams, SamplingParams
from blink.text.assets import ModelAssets

# Returns for each sequence of tokens how likely the tokens behind it are.
Step = Callable[[Sequence[list[int]], SamplingParams], Sequence[PositionLogprobs]]


class BeamSearch:
    """The search of one prompt."""

    def __init__(self, prompt: list[int], params: BeamSearchParams, assets: ModelAssets) -> None:
        self.beams = [BeamSearchSequence(prompt, [])]
        self._params = params
        self._assets = assets
        self._ends = () if params.ignore_eos else assets.eos_token_ids
        self._completed: list[BeamSearchSequence] = []

    def advance(self, positions: Sequence[PositionLogprobs]) -> None:
        """Go on from each beam with what is likely behind it, and keep the best."""
        grown: list[BeamSearchSequence] = []
        for beam, position in zip(self.beams, positions, strict=True):
            for token, entry in position.items():
                if entry.rank is None:  # the sampled token, where it is not among the likely ones
                    continue
                is_end = token in self._ends
                is_shown = not is_end or self._params.include_stop_str_in_output
                after = BeamSearchSequence(
                    [*beam.tokens, token] if is_shown else beam.tokens,
                    [*beam.logprobs, position],
                    beam.cum_logprob + entry.logprob,
                )
                if is_end:
                    after.finish_reason, after.stop_reason = "stop", token
                    self._completed.append(after)
                else:
                    grown.append(after)
        self.beams = sorted(grown, key=self._score, reverse=True)[: self._params.beam_width]

    def finish(self) -> BeamSearchOutput:
        """Return the best sequences, complete or not, with their texts."""
        for beam in self.beams:
            beam.finish_reason = "length"
        found = sorted([*self._completed, *self.beams], key=self._score, reverse=True)[: self._params.beam_width]
        for sequence in found:
            sequence.text = self._assets.tokenizer.decode(
                sequence.tokens, skip_special_tokens=self._params.skip_special_tokens
            )
        return BeamSearchOutput(found)

    def _score(self, sequence: BeamSearchSequence) -> float:
        """Return the logprob by length; a token that ends a text is no part of its length."""
        length = len(sequence.tokens) - (bool(sequence.tokens) and sequence.tokens[-1] in self._ends)
        return sequence.cum_logprob / max(length, 1) ** self._params.length_penalty


def search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    assets: ModelAssets,
    step: Step,
    note_step: Callable[[], object],
) -> list[BeamSearchOutput]:
    """Return the likeliest sequences of each prompt."""
    searches = [BeamSearch(prompt, params, assets) for prompt in prompts]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True)
    for _ in range(params.max_tokens):
        positions = step([beam.tokens for each in searches for beam in each.beams], sampling)
        at = 0
        for each in searches:
            count = len(each.beams)
            each.advance(positions[at : at + count])
            at += count
        note_step()
        if not any(each.beams for each in searches):
            break
    return [each.finish() for each in searches]
