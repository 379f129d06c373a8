# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 3."""

from __future__ import annotations

from blink.models.families.base import EVERY_LAYER, ExpertNames, Family

FAMILIES = {
    "qwen2": Family(title="Qwen 2, 2.5", qkv_bias=True, gguf="qwen2", gguf_class="Qwen2ForCausalLM"),
    "qwen3": Family(title="Qwen 3", qk_norm="head", gguf="qwen3", gguf_class="Qwen3ForCausalLM"),
    "qwen3_moe": Family(
        title="Qwen 3 MoE",
        defaults={"use_sliding_window": False},
        qk_norm="head",
        window_period=EVERY_LAYER,
        experts=ExpertNames(),
        gguf="qwen3moe",
    ),
}
