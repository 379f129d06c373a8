# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4."""

from __future__ import annotations

from blink.models.families.base import EVERY_LAYER, Family

FAMILIES = {
    "phi3": Family(
        title="Phi-3, Phi-4",
        defaults={"rope_theta": 10000.0},
        window_period=EVERY_LAYER,
        is_qkv_fused=True,
        is_gate_up_fused=True,
        gguf="phi3",
    ),
}
