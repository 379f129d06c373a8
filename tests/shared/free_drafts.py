# SPDX-License-Identifier: Apache-2.0
"""Engines whose scheduler has no table of costs: it verifies all drafts that it finds, whatever steps take."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from blink import LLM
from blink.region.layout import GRAPH_COST


def load_without_costs(model: str, **options: Any) -> LLM:
    """Load a model so: what is drafted does not depend on the machine's load."""

    def measure(geometry: np.ndarray[Any, Any], *_: Any, **__: Any) -> np.ndarray[Any, Any]:
        return np.zeros(int(geometry["num_graphs"]), GRAPH_COST)

    with mock.patch("blink.engine.base.measure_costs", measure):
        return LLM(model, **options)
