# SPDX-License-Identifier: Apache-2.0
"""The oracle of csrc/sampler: the same rules in plain PyTorch, row by row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blink.kernels.batch import Batch, Header, Param
from blink.kernels.cpu.constraint import list_allowed
from blink.kernels.operands import GRAMMAR_DONE, GREEDY_TEMPERATURE, INVALID_LOGITS
from sampling_changes import adjust_logits
from sampling_floor import find_threshold
from sampling_noise import gumbel, gumbel_of_vocabulary

_WORD_MASK = 0xFFFFFFFF


def sample(logits: Tensor, batch: Batch, num_rows: int) -> None:
    """Compute blink.kernels.sampling.sample."""
    num_rows = min(num_rows, int(batch.header[Header.NUM_ROWS]))
    slots = batch.row_slots[:num_rows]
    context_lens = batch.context_lens[:num_rows]
    for row, (slot, context_len) in enumerate(zip(slots.tolist(), context_lens.tolist(), strict=True)):
        _sample_row(logits[row], batch, row, slot, context_len)


def _sample_row(logits: Tensor, batch: Batch, row: int, slot: int, context_len: int) -> None:
    adjusted = logits.to(torch.float32, copy=True)
    may_end = constrain(adjusted, batch, slot, context_len)
    adjust_logits(adjusted, batch, slot, context_len)
    temperature = float(batch.params_f32[slot, Param.TEMPERATURE])
    is_greedy = temperature < GREEDY_TEMPERATURE
    if not is_greedy:
        adjusted.div_(temperature)
    largest = float(adjusted.max())
    if not math.isfinite(largest):
        batch.sampled_tokens[row] = GRAMMAR_DONE if may_end and largest == -math.inf else INVALID_LOGITS
        return
    token = int(adjusted.argmax()) if is_greedy else _draw(adjusted, batch, slot, context_len)
    batch.sampled_tokens[row] = token
    num_logprobs = int(batch.params[slot, Param.NUM_LOGPROBS])
    if num_logprobs >= 0:
        logprobs = logits.log_softmax(0, dtype=torch.float32)
        batch.sampled_logprobs[row] = logprobs[token]
        best, tokens = logprobs.topk(num_logprobs)
        if batch.params[slot, Param.NAMED_LOGPROBS]:
            tokens = batch.bias_tokens[slot, :num_logprobs].long()
            best = logprobs[tokens]
        batch.top_logprobs[row, :num_logprobs], batch.top_tokens[row, :num_logprobs] = best, tokens


def _draw(logits: Tensor, batch: Batch, slot: int, context_len: int) -> int:
    """Draw from the softmax of one row's logits, truncated as the slot asks: the largest of logit + Gumbel noise."""
    words = batch.params[slot].tolist()
    top_p, min_p = batch.params_f32[slot, Param.TOP_P : Param.MIN_P + 1].tolist()
    key = (words[Param.SEED_LOW] & _WORD_MASK, words[Param.SEED_HIGH] & _WORD_MASK)
    top_k = words[Param.TOP_K]
    if top_k <= 0 and top_p >= 1 and min_p == 0:
        noise = gumbel_of_vocabulary(logits.shape[0], key, context_len, logits.device)
        return int((logits + noise).argmax())
    threshold = find_threshold(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = (logits >= threshold).nonzero()[:, 0]
    return int(kept[(logits[kept] + gumbel(kept, key, context_len)).argmax()])


def constrain(logits: Tensor, batch: Batch, slot: int, context_len: int) -> bool:
    """Hide what may not come next in one row's logits (float32 [vocab]) in place; say whether the text may end."""
    if int(batch.params[slot, Param.AUTOMATON]) == 0:
        return False
    allowed, may_end = list_allowed(batch, slot, context_len)
    if allowed is None:
        logits.fill_(-torch.inf)
        return may_end
    bits = allowed[:, None] >> torch.arange(32, dtype=torch.int32) & 1
    logits.masked_fill_(bits.view(-1)[: logits.shape[0]] == 0, -torch.inf)
    return may_end
