# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 and 3."""

from __future__ import annotations

from blink.models.families.base import Family

FAMILIES = {
    "olmo2": Family(
        title="OLMo 2",
        defaults={"rope_theta": 10000.0},
        norms="after",
        qk_norm="all_heads",
        gguf="olmo2",
        gguf_windowed="olmo3",
    ),
    # Whatever stretches the context, layers with a window rotate as if nothing did, and by this base.
    "olmo3": Family(
        title="Olmo 3",
        defaults={
            "rope_theta": 500000.0,
            "rope_local_base_freq": 500000.0,
            "sliding_window": 4096,
            "rms_norm_eps": 1e-5,
        },
        norms="after",
        qk_norm="all_heads",
        window_period=4,
        gguf_local_theta=500000.0,
    ),
}
