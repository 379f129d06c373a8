# SPDX-License-Identifier: Apache-2.0
"""Serve's autoscaling policy for engines: more where requests wait, fewer where fewer would do."""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext


def scale_on_waiting(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas that the sequences need, and no state; Serve applies delays and bounds.

    `target_ongoing_requests` is what a replica can run at once (--max-num-seqs). Where sequences wait although there is
    room by that figure, for lack of KV cache, a replica's share is what it runs now.
    """
    assert context.config is not None  # Serve gives it to each policy
    metrics = context.aggregated_metrics or {}
    running, waiting = (sum(metrics.get(name, {}).values()) for name in ("running", "waiting"))
    current = context.target_num_replicas
    by_target = math.ceil((running + waiting) / context.config.target_ongoing_requests)
    if waiting < 1:
        return max(1, min(current, by_target)), {}
    by_share = math.ceil(current * (running + waiting) / running) if running else current + 1
    return max(by_target, by_share), {}
