# SPDX-License-Identifier: Apache-2.0
"""Times the decode attention of multi-head latent attention (MLA) in CUDA graphs, against a copy of the same bytes.

Medians. The default is a context of 8,192 tokens in the sizes of GLM-4.7-Flash, Kimi-K2 and DeepSeek-V3. With
--prefill, all between a layer's projections for 2,048 tokens of a prompt: absorbed, and with keys and values made of
latents.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial

import torch
from recurrent_layers import time_graph

from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch, Header
from blink.kernels.gpu.latent.expanded import plan_expanded
from blink.kernels.gpu.latent.kernels import KERNELS
from blink.kernels.latent import absorb_and_store, expand, latent_attention, plan_latent_attention
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import UNSCALED, ExpandedSizes, Expansion, LatentSizes

SIZES = {
    "GLM-4.7-Flash": ExpandedSizes(LatentSizes(20, 512, 64), 192, 256),
    "Kimi-K2": ExpandedSizes(LatentSizes(64, 512, 64), 128, 128),
    "DeepSeek-V3": ExpandedSizes(LatentSizes(128, 512, 64), 128, 128),
}
_PROMPT_TOKENS = 2048
_PROMPT_ROWS = 256  # of a step of prompts, padding included
_BLOCK_SIZE = 16
_ROTATED_BYTES = 1200 << 20  # of caches, so that nothing stays in L2 from one layer to the next


def make_batch(num_rows: int, context: int, *, queries: int = 1, padded_rows: int = 0) -> Batch:
    """Return rows of one context and so many queries, on shuffled blocks."""
    max_blocks, tokens = context // _BLOCK_SIZE, num_rows * queries
    batch = Batch.allocate(
        max_tokens=tokens,
        max_rows=max(num_rows, padded_rows),
        num_slots=num_rows,
        max_blocks=max_blocks,
        max_model_len=context,
        device="cuda",
    )
    batch.block_tables.copy_(torch.randperm(num_rows * max_blocks, device="cuda").view(num_rows, max_blocks))
    batch.row_slots[:num_rows] = torch.arange(num_rows)
    batch.query_starts.fill_(tokens)
    batch.query_starts[: num_rows + 1] = torch.arange(0, tokens + 1, queries)
    batch.context_lens.fill_(context)
    batch.header[Header.NUM_ROWS], batch.header[Header.NUM_TOKENS] = num_rows, tokens
    batch.header[Header.NUM_DECODE_ROWS] = num_rows if queries == 1 else 0
    return batch


def time_decode(name: str, num_rows: int, context: int, dtype: torch.dtype) -> None:
    """Print how long a layer's attention takes, and a copy that reads and writes as many bytes together."""
    sizes = SIZES[name].latents
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


def time_prefill(name: str, num_rows: int, tokens: int, earlier: int, dtype: torch.dtype) -> None:
    """Print how long both forms take with prompts of so many tokens together, and what differs at most."""
    sizes = SIZES[name]
    (heads, rank, rope), nope, value = sizes
    own = tokens // num_rows
    batch = make_batch(num_rows, own + earlier, queries=own, padded_rows=_PROMPT_ROWS)
    places = torch.arange(earlier, own + earlier, device="cuda")
    slots = (batch.block_tables[:, places // _BLOCK_SIZE] * _BLOCK_SIZE + places % _BLOCK_SIZE).int().flatten()
    shape = 1, num_rows * (own + earlier) // _BLOCK_SIZE, _BLOCK_SIZE, 1, rank + rope
    cache = LayerCache(torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype))
    joined = torch.randn(heads, nope + value, rank, device="cuda", dtype=torch.bfloat16) / rank**0.5
    keys, values = joined.split([nope, value], dim=1)
    expansion = Expansion(torch.ones(rank, device="cuda", dtype=torch.bfloat16), keys, values)
    query = torch.randn(tokens, heads, nope + rope, device="cuda", dtype=torch.bfloat16)
    kept = torch.randn(tokens, rank + rope, device="cuda", dtype=torch.bfloat16)
    operands = query, kept, torch.randn(tokens, rope, device="cuda"), slots, cache, expansion
    counts, scale = (tokens, _PROMPT_ROWS), (nope + rope) ** -0.5
    absorbed = plan_latent_attention(KERNELS, batch, *counts, sizes.latents, cache, torch.bfloat16)
    expanded = plan_expanded(batch, *counts, sizes, cache, torch.bfloat16)

    def absorb() -> torch.Tensor:
        folded = absorb_and_store(KERNELS, *operands)
        return expand(KERNELS, latent_attention(folded, cache, absorbed, scale), expansion)

    def mix() -> torch.Tensor:
        return expanded(*operands, scale, UNSCALED)

    differs = float((absorb().float() - mix().float()).abs().max() / absorb().float().abs().max())
    before, after = time_graph([absorb] * 4), time_graph([mix] * 4)
    print(
        f"{name:14} {num_rows:3} prompts of {own} after {earlier:6} {str(dtype).removeprefix('torch.'):13} absorbed "
        f"{before:9.1f} us   expanded {after:9.1f} us   {before / after:5.2f} times as fast   differ by {differs:.4f}",
        flush=True,
    )


def main() -> None:
    """Time what the options say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prefill", action="store_true", help="time prompts: --rows of them share 2,048 tokens")
    parser.add_argument("--earlier", nargs="+", type=int, default=[0, 8192, 32768], help="tokens before a prompt's own")
    options = parser.parse_args()
    for name in options.models:
        for dtype in (torch.bfloat16, FP8):
            if options.prefill:
                for num_rows, earlier in itertools.product(options.rows, options.earlier):
                    time_prefill(name, num_rows, _PROMPT_TOKENS, earlier, dtype)
                continue
            for num_rows in options.rows:
                time_decode(name, num_rows, options.context, dtype)


if __name__ == "__main__":
    main()
