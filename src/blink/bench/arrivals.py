# SPDX-License-Identifier: Apache-2.0
"""When requests are sent: an open loop, so the times depend on the rate alone, never on the server."""

from __future__ import annotations

import math

import numpy as np


def draw_arrivals(rate: float, duration: float, num_requests: int, rng: np.random.Generator) -> list[float]:
    """Draw the times of a Poisson process in seconds, ascending; an infinite rate puts all at 0.

    Args:
        duration: times are smaller than this, unless `num_requests` is given.
        num_requests: how many, or 0 for as many as `duration` holds.
    """
    if math.isinf(rate):
        return [0.0] * num_requests
    if num_requests:
        return np.cumsum(rng.exponential(1 / rate, num_requests)).tolist()
    times: list[float] = []
    now = float(rng.exponential(1 / rate))
    while now < duration:
        times.append(now)
        now += float(rng.exponential(1 / rate))
    return times
