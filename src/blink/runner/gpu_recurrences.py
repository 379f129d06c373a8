# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernels for recurrent layers: which of them a step may take, and what runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from blink.kernels.gpu.recurrent import decode as delta_decode
from blink.kernels.gpu.recurrent import mamba
from blink.kernels.gpu.recurrent import prefill as delta_prefill
from blink.models.layers import GatedDeltaNet
from blink.models.mamba import Mamba2
from blink.plan.site import Bucket
from blink.runner.planner import Option

DELTA_DECODE, DELTA_CHUNKS = "delta rule of one token", "delta rule in chunks"
MAMBA_SCAN = "Mamba-2 rule token by token"

RECURRENCES: dict[str, Any] = {
    DELTA_DECODE: delta_decode.decode,
    DELTA_CHUNKS: delta_prefill.prefill,
    MAMBA_SCAN: mamba.advance,
}


def list_recurrences(mixer: GatedDeltaNet | Mamba2, dtype: str, bucket: Bucket) -> Iterable[Option]:
    """List the kernels for a recurrent layer's rule; dtype: that the model computes in."""
    delta_net = mixer.delta_net
    if delta_net is None:
        yield Option(MAMBA_SCAN, None)
        return
    if bucket.decoding:
        yield Option(DELTA_DECODE, delta_decode.refuses(delta_net, dtype))
    yield Option(DELTA_CHUNKS, delta_prefill.refuses(delta_net, dtype))
