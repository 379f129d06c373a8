# SPDX-License-Identifier: Apache-2.0
"""Times the decode attention of multi-head latent attention (MLA) in CUDA graphs, against a copy of the same bytes.

Medians. The default is a context of 8,192 tokens in the sizes of GLM-4.7-Flash, Kimi-K2 and DeepSeek-V3.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from recurrent_layers import time_graph

from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch, Header
from blink.kernels.gpu.latent.kernels import KERNELS
from blink.kernels.latent import latent_attention, plan_latent_attention
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import LatentSizes

SIZES = {
    "GLM-4.7-Flash": LatentSizes(20, 512, 64),
    "Kimi-K2": LatentSizes(64, 512, 64),
    "DeepSeek-V3": LatentSizes(128, 512, 64),
}
_BLOCK_SIZE = 16
_ROTATED_BYTES = 1200 << 20  # of caches, so that nothing stays in L2 from one layer to the next


def make_batch(num_rows: int, context: int) -> Batch:
    """Return decode rows of one context, on shuffled blocks."""
    max_blocks = context // _BLOCK_SIZE
    batch = Batch.allocate(
        max_tokens=num_rows,
        max_rows=num_rows,
        num_slots=num_rows,
        max_blocks=max_blocks,
        max_model_len=context,
        device="cuda",
    )
    batch.block_tables.copy_(torch.randperm(num_rows * max_blocks, device="cuda").view(num_rows, max_blocks))
    batch.row_slots.copy_(torch.arange(num_rows))
    batch.query_starts.copy_(torch.arange(num_rows + 1))
    batch.context_lens.fill_(context)
    for word in (Header.NUM_ROWS, Header.NUM_TOKENS, Header.NUM_DECODE_ROWS):
        batch.header[word] = num_rows
    return batch


def time_decode(name: str, num_rows: int, context: int, dtype: torch.dtype) -> None:
    """Print how long a layer's attention takes, and a copy that reads and writes as many bytes together."""
    sizes = SIZES[name]
    batch, kept = make_batch(num_rows, context), sizes.rank + sizes.rope
    num_blocks = num_rows * context // _BLOCK_SIZE
    layer_bytes = num_blocks * _BLOCK_SIZE * kept * dtype.itemsize
    layers = max(4, min(128, _ROTATED_BYTES // layer_bytes))
    shape = 1, num_blocks, _BLOCK_SIZE, 1, kept
    caches = [LayerCache(torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)) for _ in range(layers)]
    query = torch.randn(num_rows, sizes.heads, kept, device="cuda", dtype=torch.bfloat16)
    plan = plan_latent_attention(KERNELS, batch, num_rows, num_rows, sizes, caches[0], torch.bfloat16)
    steps = [partial(latent_attention, query, cache, plan, 0.07) for cache in caches]
    half = num_blocks // 2
    copies = [partial(cache.keys[half : 2 * half].copy_, cache.keys[:half]) for cache in caches]
    step, copied = time_graph(steps), time_graph(copies)
    print(
        f"{name:14} {num_rows:4} rows of {context} {str(dtype).removeprefix('torch.'):13} {step:9.2f} us "
        f"{layer_bytes / step / 1e6:6.2f} TB/s   copy {copied:9.2f} us {layer_bytes / copied / 1e6:6.2f} TB/s   "
        f"{copied / step:5.2f} of it",
        flush=True,
    )


def main() -> None:
    """Time what the options say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=8192)
    options = parser.parse_args()
    for name in options.models:
        for dtype in (torch.bfloat16, FP8):
            for num_rows in options.rows:
                time_decode(name, num_rows, options.context, dtype)


if __name__ == "__main__":
    main()
