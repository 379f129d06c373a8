# SPDX-License-Identifier: Apache-2.0
"""The kernels of latent attention on the GPU, as kernels/latent.py calls them."""

from __future__ import annotations

import torch

from blink.kernels.batch import Batch
from blink.kernels.gpu.latent.attend import attend
from blink.kernels.gpu.latent.expanded import EXPANDED, plan_expanded
from blink.kernels.gpu.latent.plan import plan_latent_attention
from blink.kernels.gpu.latent.store import absorb_and_store, expand
from blink.kernels.latent import AttendLatents, LatentKernels
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import LatentSizes


def plan_latents(
    batch: Batch, num_tokens: int, num_rows: int, sizes: LatentSizes, cache: LayerCache, dtype: torch.dtype
) -> AttendLatents:
    """Divide the keys of a step's rows among programs."""
    planned = plan_latent_attention(batch, num_tokens, num_rows, sizes, cache, dtype)
    return lambda query, cache, scale, kv_scales: attend(query, cache, planned, sizes, scale, kv_scales)


KERNELS = LatentKernels(plan_latents, absorb_and_store, expand, {EXPANDED: plan_expanded})
