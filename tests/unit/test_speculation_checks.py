# SPDX-License-Identifier: Apache-2.0
"""Models whose layers do not verify drafts refuse them by name, and no other model does."""

from __future__ import annotations

import pytest

from blink.errors import ConfigError
from blink.speculation import Speculation, check_on_gpu, check_recurrent

DRAFTING = Speculation(num_tokens=3, ngram_min=2, ngram_max=5)


def test_recurrent_layers_refuse_drafts() -> None:
    with pytest.raises(ConfigError, match="recurrent layers"):
        check_recurrent(DRAFTING, True)
    check_recurrent(DRAFTING, False)
    check_recurrent(Speculation(), True)


@pytest.mark.parametrize(
    ("is_latent", "has_windows", "told"),
    [(True, False, "latent attention"), (False, True, "sliding window"), (True, True, "latent attention")],
)
def test_attention_that_is_not_verified_on_gpus_refuses_drafts(is_latent: bool, has_windows: bool, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{told}.*--device cpu"):
        check_on_gpu(DRAFTING, is_latent=is_latent, has_windows=has_windows)
    check_on_gpu(DRAFTING, is_latent=False, has_windows=False)
    check_on_gpu(Speculation(), is_latent=is_latent, has_windows=has_windows)
