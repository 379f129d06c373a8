# SPDX-License-Identifier: Apache-2.0
"""How the likeliest sequences are searched for: the names and defaults of vLLM's BeamSearchParams."""

from __future__ import annotations

from dataclasses import dataclass

from blink.errors import BadRequestError, wrong_value
from blink.sampling_params import MAX_LOGPROBS
from blink.structured_outputs import StructuredOutputsParams

_MAX_LENGTH_PENALTY = 10  # any length to its power is a number


@dataclass(slots=True)
class BeamSearchParams:
    """Describe a search for the likeliest sequences, with vLLM's fields.

    Args:
        beam_width: sequences that are kept in each step, and returned.
        temperature: taken; sequences are scored by the model's own logprobs, as by vLLM's default.
        length_penalty: sequences are ranked by their logprob divided by their length to this power.
        early_stopping: end with the step in which beam_width sequences are complete; else others may overtake them.
    Raises:
        BadRequestError: a value is out of range; `param` names it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    early_stopping: bool = False

    def __post_init__(self) -> None:
        most = MAX_LOGPROBS // 2  # a step looks at twice as many tokens
        if not 1 <= self.beam_width <= most:
            raise wrong_value("beam_width", f"between 1 and {most}", self.beam_width)
        if self.max_tokens < 1:
            raise wrong_value("max_tokens", "at least 1", self.max_tokens)
        if self.structured_outputs is not None:
            raise BadRequestError("Beam search does not keep to structured_outputs.", "structured_outputs")
        if not self.temperature >= 0:
            raise wrong_value("temperature", "at least 0", self.temperature)
        if not abs(self.length_penalty) <= _MAX_LENGTH_PENALTY:  # NaN is none
            rule = f"between -{_MAX_LENGTH_PENALTY} and {_MAX_LENGTH_PENALTY}"
            raise wrong_value("length_penalty", rule, self.length_penalty)
