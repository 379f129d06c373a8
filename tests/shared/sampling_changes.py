# SPDX-License-Identifier: Apache-2.0
"""What changes a row's logits before sampling: minimum length, logit bias and the three penalties, in vLLM's order."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.kernels.batch import Batch, Param

_CLOSING_STEPS, _CLOSING_LOGIT = 8, 1e6


def adjust_logits(logits: Tensor, batch: Batch, slot: int, context_len: int) -> None:
    """Change one row's logits (float32 [vocab]) in place as its slot's parameters ask for.

    Penalties are counted afresh from the slot's first context_len tokens, so that no state outlives the step.
    """
    words = batch.params[slot].tolist()
    repetition, presence, frequency = batch.params_f32[
        slot, Param.REPETITION_PENALTY : Param.FREQUENCY_PENALTY + 1
    ].tolist()
    num_prompt = words[Param.NUM_PROMPT_TOKENS]
    if context_len - num_prompt < words[Param.MIN_TOKENS]:
        logits[batch.stop_tokens[slot, : words[Param.NUM_STOP_TOKENS]]] = -torch.inf
    if num_biases := words[Param.NUM_BIASES]:
        logits.index_add_(0, batch.bias_tokens[slot, :num_biases], batch.bias_values[slot, :num_biases])
    history = batch.tokens[slot, :context_len]
    if repetition != 1:
        seen = history.unique()
        found = logits[seen]
        logits[seen] = torch.where(found > 0, found / repetition, found * repetition)
    if presence != 0 or frequency != 0:
        generated, counts = history[num_prompt:].unique(return_counts=True)
        logits[generated] -= frequency * counts + presence
    _close_reasoning(logits, words, history[num_prompt:].tolist())


def _close_reasoning(logits: Tensor, words: list[int], generated: list[int]) -> None:
    """Let the token come that ends reasoning, within some steps behind the last token that it may have."""
    limit, begin, end = (words[place] for place in (Param.REASONING_LIMIT, Param.REASONING_OPEN, Param.REASONING_CLOSE))
    if limit == 0 or not 0 <= len(generated) - (limit - 1) < _CLOSING_STEPS:
        return
    if (begin < 0 or begin in generated) and end not in generated and logits[end] > -torch.inf:
        logits[end] = _CLOSING_LOGIT
