# SPDX-License-Identifier: Apache-2.0
"""Choose each row's next token from its logits, with the semantics of vLLM's sampler, and report log probabilities.

Randomness is counter-based: a token depends on its row's logits, seed and length alone, never on the batch around it.
"""

from __future__ import annotations

from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.cpu import sampling as cpu


def sample(logits: Tensor, batch: Batch, num_rows: int, *, deterministic: bool = False) -> None:
    """Write the sampled token of each row, and its log probabilities if asked for, to the batch's outputs.

    logits: [num_rows, vocab], of each row's last token. Log probabilities are those of the logits as given. A row
    without a finite largest logit gets INVALID_LOGITS and no log probabilities; the others do not notice.
    deterministic: no sum depends on the number of rows, as none ever does on a CPU.
    """
    assert logits.ndim == 2
    assert logits.shape[0] == num_rows <= batch.sampled_tokens.shape[0]
    if logits.is_cuda:
        from blink.kernels.gpu import sampling as gpu

        return gpu.sample(logits, batch, num_rows, deterministic=deterministic)
    return cpu.sample(logits, batch, num_rows)
