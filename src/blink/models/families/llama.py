# SPDX-License-Identifier: Apache-2.0
"""Llama, and models of other makers in its form."""

from __future__ import annotations

from blink.models.families.base import Family

FAMILIES = {
    "llama": Family(
        title="Llama, SmolLM2",
        defaults={"rope_theta": 10000.0},
        gguf="llama",
        gguf_mixture="mixtral",
        is_interleaved=True,
        gguf_class="LlamaForCausalLM",
    ),
}
