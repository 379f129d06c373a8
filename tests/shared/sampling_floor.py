# SPDX-License-Identifier: Apache-2.0
"""Which tokens may be sampled: min-p, then top-k, then top-p over what is left, as in vLLM."""

from __future__ import annotations

import math

from torch import Tensor

# Top-p usually ends within so many tokens; finding them is much cheaper than sorting the vocabulary.
_FIRST_LOOK = 1024


def find_threshold(logits: Tensor, *, top_k: int, top_p: float, min_p: float) -> float:
    """Return the smallest logit (already divided by the temperature) of one row that may be sampled.

    All tokens with that logit may be: equal logits are never told apart, so that no sort's order matters.
    logits: float32 [vocab]; top_k 0, top_p 1 and min_p 0 are off.
    """
    threshold = -math.inf
    if min_p > 0:
        threshold = float(logits.max()) + math.log(min_p)
    if 0 < top_k < logits.shape[0]:
        threshold = max(threshold, float(logits.topk(top_k).values[-1]))
    if top_p < 1:
        threshold = _find_top_p(logits[logits >= threshold], top_p)
    return threshold


def _find_top_p(logits: Tensor, top_p: float) -> float:
    # In float64: the masses of a whole vocabulary, summed in float32, err by more than a token's.
    total = logits.double().logsumexp(0)
    for count in (min(_FIRST_LOOK, logits.shape[0]), logits.shape[0]):
        largest = logits.topk(count).values
        probabilities = (largest.double() - total).exp()
        mass = probabilities.cumsum(0)
        if float(mass[-1]) >= top_p:
            break
    # A token stays if those before it hold less than top_p: the first always does.
    num_kept = int(((mass - probabilities) < top_p).sum())
    return float(largest[num_kept - 1])
