# SPDX-License-Identifier: Apache-2.0
"""The logprobs of a prompt's own tokens. For evaluations: plain PyTorch on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blink.kernels.batch import Batch, Param
from blink.sampling_params import MAX_LOGPROBS

_CHUNK = 128  # tokens whose logits exist at once


def score_prompts(
    hidden: Tensor, compute_head: Callable[[Tensor], Tensor], batch: Batch, num_rows: int, *, writes: bool = True
) -> None:
    """Write the logprob of the token behind each of the batch, and the most likely ones in its place.

    hidden: [tokens, hidden], of every token; compute_head: returns the logits of some of them; num_rows: padding
    included; writes: False where compute_head serves another rank, which writes them. On the CPU only tokens are
    treated whose slots ask for it; on a GPU all are, for nothing there may depend on the batch.
    """
    tokens = torch.arange(hidden.shape[0], device=hidden.device)
    slots = _slots_of(batch, tokens, num_rows)
    if not hidden.is_cuda:
        wanted = _wanted(batch, tokens, slots)
        tokens, slots = tokens[wanted], slots[wanted]
    for chunk, slots_of_chunk in zip(tokens.split(_CHUNK), slots.split(_CHUNK), strict=True):
        logits = compute_head(hidden.index_select(0, chunk))
        if writes:
            _score(logits, batch, chunk, slots_of_chunk)


def _slots_of(batch: Batch, tokens: Tensor, num_rows: int) -> Tensor:
    """Return the slot of the row that each token belongs to."""
    ends = batch.query_starts[1 : num_rows + 1]  # what lies behind these is of other steps
    rows = torch.searchsorted(ends.contiguous(), tokens.to(torch.int32), right=True)
    return batch.row_slots[rows.clamp_(max=num_rows - 1)].long()


def _wanted(batch: Batch, tokens: Tensor, slots: Tensor) -> Tensor:
    params = batch.params[slots]
    is_inside = batch.positions[: tokens.shape[0]] + 1 < params[:, Param.NUM_PROMPT_TOKENS]
    return (params[:, Param.NUM_PROMPT_LOGPROBS] > 0) & is_inside


def _score(logits: Tensor, batch: Batch, tokens: Tensor, slots: Tensor) -> None:
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    place = (batch.positions[tokens] + 1).clamp_(max=batch.tokens.shape[1] - 1).long()
    following = batch.tokens[slots, place].long().clamp_(min=0, max=logits.shape[1] - 1)
    best = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]))
    width = best.values.shape[1]
    batch.prompt_logprobs.index_copy_(0, tokens, logprobs.gather(1, following[:, None])[:, 0])
    batch.prompt_top_logprobs[:, :width].index_copy_(0, tokens, best.values)
    batch.prompt_top_tokens[:, :width].index_copy_(0, tokens, best.indices.to(torch.int32))
