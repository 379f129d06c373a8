# SPDX-License-Identifier: Apache-2.0
"""What steps compute in vain: the tokens between those of a step and those that its graph was captured for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def padding_share(launches: npt.NDArray[Any], sizes: Sequence[tuple[int, int]]) -> float:
    """Return the share of the tokens computed by steps with prompts that are padding; NaN without such steps.

    launches: entries of the trace ring, those of segments included; sizes: (tokens, rows) of the engine's graphs.
    """
    mixed = (launches["num_tokens"] != launches["num_decode_rows"]) & (launches["segment"] == 0)
    computed = np.array([tokens for tokens, _ in sizes])[launches["graph"][mixed]].sum()
    return 1 - int(launches["num_tokens"][mixed].sum()) / int(computed) if computed else float("nan")
