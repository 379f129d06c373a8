# SPDX-License-Identifier: Apache-2.0
"""Which models may verify drafts on a GPU, by their description. Needs no torch."""

from __future__ import annotations

from blink.models.spec import ModelSpec
from blink.speculation import Speculation, check_on_gpu


def check_model_on_gpu(speculation: Speculation, spec: ModelSpec) -> None:
    """Refuse speculation, with a `ConfigError`, for layers whose drafts no test on a GPU has verified.

    spec: of a rank's part, where there are several.
    """
    check_on_gpu(
        speculation,
        is_latent=any(one.latent is not None for one in spec.attentions),
        has_windows=any(one.window > 0 for one in spec.attentions),
        parts_states=spec.shard.size > 1 and bool(spec.cache_layout.recurrent),
    )
