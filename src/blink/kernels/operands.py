# SPDX-License-Identifier: Apache-2.0
"""What the operations and their code for each device agree on beside the batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from blink.region.layout import CONSTANTS

# Below this temperature sampling is greedy, as in vLLM.
GREEDY_TEMPERATURE = 1e-5
# Sampled of a row whose largest logit, as changed and scaled, is not finite: that sequence alone ends with an error.
NO_TOKEN = CONSTANTS["no_token"]
# Sampled of a row whose automaton allows nothing more, and whose text may end.
TEXT_END = CONSTANTS["text_end"]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The RMS norms of each query head and each key head."""

    query_weight: Tensor  # [head_dim]
    key_weight: Tensor  # [head_dim]
    eps: float
