# SPDX-License-Identifier: Apache-2.0
"""OLMo 2."""

from __future__ import annotations

from blink.models.families.base import Family

FAMILIES = {
    "olmo2": Family(title="OLMo 2", defaults={"rope_theta": 10000.0}, norms="after", qk_norm="all_heads", gguf="olmo2"),
}
