# SPDX-License-Identifier: Apache-2.0
"""Time attention and rotary kernels in the shapes of Llama-3-8B: medians of graph replays, per layer, and the floor.

"decode" is the kernel of decoding rows, which rotates too, "Hopper" that of csrc/kernels/prefill, which longer steps
take where they can, and "cuDNN" its attention of a prompt alone, whose keys lie in no pages. `--fp8`: with the KV cache
in FP8; `--sweep` compares Triton's tiles instead; `--heads 32 4 512` takes another shape, of Gemma 4 31B without a
window. Run with: python benchmarks/kernels/attention.py [--fp8] [--sweep]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import triton.testing
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blink.formats.base import name_dtype
from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch, Header
from blink.kernels.gpu.attention import decode as decoding
from blink.kernels.gpu.attention import plan as attention_plan
from blink.kernels.gpu.attention.decode import decode_attention
from blink.kernels.gpu.attention.paged import paged_attention
from blink.kernels.gpu.attention.plan import GpuAttentionPlan, Tile, plan_attention
from blink.kernels.gpu.attention.prefill import refuses
from blink.kernels.gpu.rotary import rotate_and_store
from blink.kernels.layer_cache import LayerCache
from blink.models.layers import Attention
from blink.models.rope import Rope

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BLOCK_SIZE = 16
LARGE = 256  # heads of more have tiles of their own
# Several layers' caches in turn, so that the 60 MB of L2 hold none of them.
LAYERS = 16
BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6

Rows = list[tuple[int, int]]
CASES: dict[str, Rows] = {
    "1 x 400": [(1, 400)],
    "32 x 400": [(1, 400)] * 32,
    "64 x 400": [(1, 400)] * 64,
    "256 x 400": [(1, 400)] * 256,
    "1 x 32768": [(1, 32768)],
    "255 x 400 + 32768": [(1, 400)] * 255 + [(1, 32768)],
    "64 prompt": [(64, 64)],
    "128 prompt": [(128, 128)],
    "192 prompt": [(192, 192)],
    "256 prompt": [(256, 256)],
    "512 prompt": [(512, 512)],
    "1024 prompt": [(1024, 1024)],
    "2048 prompt": [(2048, 2048)],
    "2048 of 8192": [(2048, 8192)],
    "2048 of 32768": [(2048, 32768)],
    "32 x 400 + 224 prompt": [(1, 400)] * 32 + [(224, 224)],
    "64 x 400 + 448 prompt": [(1, 400)] * 64 + [(448, 448)],
    "64 x 400 + 1984 prompt": [(1, 400)] * 64 + [(1984, 1984)],
    "64 x 400 + 1984 of 8192": [(1, 400)] * 64 + [(1984, 8192)],
    "64 x 400 + 8 x 248 of 2000": [(1, 400)] * 64 + [(248, 2000)] * 8,
    "50 after 16384": [(50, 16434)],
    "128 after 2048": [(128, 2176)],
}


def describe_attention() -> Attention:
    return Attention(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, rope=Rope(theta=1e4, rotary_dim=HEAD_DIM))


def make_batch(rows: Rows) -> tuple[Batch, int]:
    """Make a batch of rows (queries, context length) and return it with its number of cache blocks."""
    num_tokens, longest = sum(count for count, _ in rows), max(length for _, length in rows)
    needed = [-(-length // BLOCK_SIZE) for _, length in rows]
    batch = Batch.allocate(
        max_tokens=num_tokens, max_rows=len(rows), num_slots=len(rows), max_blocks=max(needed), max_model_len=longest
    )
    blocks = torch.randperm(sum(needed), dtype=torch.int32).split(needed)
    for row, ((count, length), own) in enumerate(zip(rows, blocks, strict=True)):
        batch.block_tables[row, : len(own)] = own
        batch.row_slots[row], batch.context_lens[row] = row, length
        batch.query_starts[row + 1] = batch.query_starts[row] + count
        places = torch.arange(length - count, length)
        start = int(batch.query_starts[row])
        batch.kv_slots[start : start + count] = own[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    batch.header[Header.NUM_ROWS], batch.header[Header.NUM_TOKENS] = len(rows), num_tokens
    batch.header[Header.NUM_DECODE_ROWS] = sum(count == 1 for count, _ in rows)
    moved = {field.name: getattr(batch, field.name).cuda() for field in dataclasses.fields(batch)}
    return Batch(**moved), sum(needed)


def time_graph(run: Callable[[], None]) -> float:
    """Return the median microseconds of one replay of what `run` launches."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = triton.testing.do_bench(graph.replay, warmup=20, rep=80, return_mode="all")  # pyright: ignore[reportAssignmentType]
    return statistics.median(times) * 1e3


def floor(rows: Rows, itemsize: int) -> float:
    """Return the microseconds that the keys' and values' bytes, or the GEMMs, take at least."""
    cell = KV_HEADS * HEAD_DIM * 2 * itemsize
    num_bytes = sum(length * cell + 2 * count * HEADS * HEAD_DIM * 2 for count, length in rows)
    pairs = sum(count * (2 * length - count + 1) // 2 for count, length in rows)
    return max(num_bytes / BYTES_PER_US, 4 * pairs * HEADS * HEAD_DIM / FLOPS_PER_US)


class Case:
    """One batch with caches and queries of several layers."""

    def __init__(self, rows: Rows, dtype: torch.dtype = torch.bfloat16) -> None:
        self.rows = rows
        self.batch, num_blocks = make_batch(rows)
        self.num_tokens = sum(count for count, _ in rows)
        shape = (2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.caches = [LayerCache(torch.randn(shape, device="cuda").to(dtype)) for _ in range(LAYERS)]
        self.qkv = torch.randn(
            LAYERS, self.num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=torch.bfloat16, device="cuda"
        )
        self.query = self.qkv[..., : HEADS * HEAD_DIM].reshape(LAYERS, self.num_tokens, HEADS, HEAD_DIM).contiguous()
        self.rotation = torch.rand(self.num_tokens, HEAD_DIM, device="cuda")

    @property
    def is_decoding(self) -> bool:
        return all(count == 1 for count, _ in self.rows)

    def plan(self) -> GpuAttentionPlan:
        sizes, attentions = (self.num_tokens, len(self.rows)), [describe_attention()]
        return plan_attention(self.batch, *sizes, attentions, self.caches[0], self.qkv.dtype)

    def attend(self) -> None:
        plan = self.plan()
        for query, cache in zip(self.query, self.caches, strict=True):
            paged_attention(query, cache, plan)

    def rotate(self) -> None:
        for qkv, cache in zip(self.qkv, self.caches, strict=True):
            rotate_and_store(qkv, self.rotation, self.batch.kv_slots, cache)

    def decode(self) -> None:
        for qkv, cache in zip(self.qkv, self.caches, strict=True):
            decode_attention(qkv, cache, self.batch, self.rotation)  # all at position 0

    def time_attention(self) -> float:
        """Return microseconds per layer, without the plan's."""
        return (time_graph(self.attend) - time_graph(lambda: self._keep(self.plan()))) / LAYERS

    def time_on_hopper(self) -> float:
        """Return the same with the kernel of warpgroups for rows of several queries; NaN where there is none."""
        dtypes = name_dtype(self.qkv.dtype), name_dtype(self.caches[0].dtype)
        if self.is_decoding or refuses(describe_attention(), BLOCK_SIZE, dtypes):
            return math.nan
        with mock.patch.object(attention_plan, "_PROMPT_PAIRS", 0):
            return self.time_attention()

    def time_triton(self) -> float:
        """Return the same without it."""
        with mock.patch.object(attention_plan, "_PROMPT_PAIRS", math.inf):
            return self.time_attention()

    def time_cudnn(self) -> float:
        """Return what cuDNN takes for one prompt: all earlier keys, then its own, without adding both up."""
        if len(self.rows) > 1 or self.num_tokens == 1 or HEAD_DIM > LARGE:
            return math.nan
        earlier = self.rows[0][1] - self.num_tokens
        query, key, value = torch.randn(3, 1, HEADS, self.num_tokens, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        keys, values = torch.randn(2, 1, HEADS, earlier, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

        def attend() -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                scaled_dot_product_attention(query, key, value, is_causal=True)
                if earlier:
                    scaled_dot_product_attention(query, keys, values)

        return time_graph(attend)

    def _keep(self, plan: GpuAttentionPlan) -> None:
        assert plan.num_tokens == self.num_tokens


def report(dtype: torch.dtype) -> None:
    heads = ("plan", "Triton", "Hopper", "cuDNN", "decode", "floor", "rotary", "floor")
    print(f"{'rows x context':28}" + "".join(f"{head:>10}" for head in heads) + "  us per layer")
    for name, rows in CASES.items():
        case = Case(rows, dtype)
        takes_decode = case.is_decoding and not decoding.refuses(describe_attention(), BLOCK_SIZE, "bfloat16")
        decode = time_graph(case.decode) / LAYERS if takes_decode else math.nan
        plan = time_graph(lambda case=case: case._keep(case.plan()))
        rotary_floor = 2 * case.qkv[0].numel() * 2 / BYTES_PER_US
        triton_tiles, rotary = case.time_triton(), time_graph(case.rotate) / LAYERS
        others = (case.time_on_hopper(), case.time_cudnn(), decode)
        times = (plan, triton_tiles, *others, floor(rows, dtype.itemsize), rotary, rotary_floor)
        print(f"{name:28}" + "".join(f"{time:10.2f}" for time in times), flush=True)


def candidates() -> Iterator[tuple[str, Tile, Tile]]:
    """Yield tiles worth comparing: one family of each kind at a time."""
    narrow, wide = attention_plan.choose_tiles(torch.bfloat16, HEADS // KV_HEADS, HEADS * 512, HEAD_DIM)
    if HEAD_DIM > LARGE:
        yield from large_candidates(narrow, wide)
        return
    for (block_n, chunk), programs, stages in itertools.product(((32, 64), (64, 64), (64, 128)), (264, 396), (2, 3, 4)):
        tile = dataclasses.replace(narrow, block_n=block_n, min_chunk=chunk, num_programs=programs, num_stages=stages)
        yield f"narrow n{block_n} c{chunk} p{programs} s{stages}", tile, wide
    for sizes in itertools.product((32, 64, 128), (32, 64), (256, 512), (4, 8), (2, 3)):
        block_m, block_n, chunk, warps, stages = sizes
        tile = dataclasses.replace(
            wide, block_m=block_m, block_n=block_n, min_chunk=chunk, num_warps=warps, num_stages=stages
        )
        yield f"wide m{block_m} n{block_n} c{chunk} w{warps} s{stages}", narrow, tile


def large_candidates(narrow: Tile, wide: Tile) -> Iterator[tuple[str, Tile, Tile]]:
    for block_n, chunk, programs, warps, stages in itertools.product((16, 32), (64, 128), (128, 256), (4, 8), (2, 3)):
        tile = dataclasses.replace(
            narrow, block_n=block_n, min_chunk=chunk, num_programs=programs, num_warps=warps, num_stages=stages
        )
        yield f"narrow n{block_n} c{chunk} p{programs} w{warps} s{stages}", tile, wide
    for (block_m, warps), block_n, chunk, stages in itertools.product(
        ((32, 8), (64, 8), (64, 16)), (16, 32), (256, 512), (1, 2, 3)
    ):
        tile = dataclasses.replace(
            wide, block_m=block_m, block_n=block_n, min_chunk=chunk, num_warps=warps, num_stages=stages
        )
        yield f"wide m{block_m} n{block_n} c{chunk} w{warps} s{stages}", narrow, tile


def sweep() -> None:
    cases = {name: Case(rows) for name, rows in CASES.items()}
    for label, narrow, wide in candidates():
        attention_plan.choose_tiles = lambda *step, tiles=(narrow, wide): tiles  # noqa: ARG005
        is_wide = label.startswith("wide")
        found = [f"{name}: {case.time_triton():.2f}" for name, case in cases.items() if is_wide != case.is_decoding]
        print(f"{label:26}", " | ".join(found), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="compare tiles")
    parser.add_argument("--fp8", action="store_true", help="KV cache in FP8")
    parser.add_argument("--heads", type=int, nargs=3, default=(HEADS, KV_HEADS, HEAD_DIM), help="queries, KV, size")
    options = parser.parse_args()
    HEADS, KV_HEADS, HEAD_DIM = options.heads
    sweep() if options.sweep else report(FP8 if options.fp8 else torch.bfloat16)
