# SPDX-License-Identifier: Apache-2.0
"""The outputs of a beam search, as vLLM's `LLM.beam_search` returns them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blink.beam_search_params import BeamSearchParams
from blink.outputs import BeamSearchOutput, BeamSearchSequence, logprobs_of
from blink.request.beam_search import Beam, Tokens, run_steps, search
from blink.text.assets import ModelAssets
from blink.text.generation import TokenLogprob


def search_beams(
    prompts: Sequence[Tokens],
    params: BeamSearchParams,
    assets: ModelAssets,
    score: Callable[[list[Tokens]], Sequence[TokenLogprob]],
) -> list[BeamSearchOutput]:
    """Return the likeliest sequences of each prompt; `score` returns one position for each sequence."""
    found = run_steps(search(prompts, params, assets.eos_token_ids), score)
    return [BeamSearchOutput([_output(beam, params, assets) for beam in beams]) for beams in found]


def _output(beam: Beam, params: BeamSearchParams, assets: ModelAssets) -> BeamSearchSequence:
    tokens: list[int] = beam.tokens.tolist()
    return BeamSearchSequence(
        tokens,
        [logprobs_of(assets.tokenizer, entry) for entry in beam.logprobs],
        beam.cum_logprob,
        assets.tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens),
        "length" if beam.end is None else "stop",
        beam.end,
    )
