# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportMissingParameterType=false
"""Times the delta-rule kernels in the shapes of Qwen3.6-35B-A3B and Qwen3.6-27B, in CUDA graphs.

A decoding step against a copy of the same bytes; prompts against the recurrence token by token; copies to snapshots;
rows that verify drafts against plain decoding. Medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from blink.kernels.delta_rule import DeltaWeights, Projections
from blink.kernels.gpu.recurrent.decode import decode
from blink.kernels.gpu.recurrent.prefill import prefill
from blink.kernels.gpu.recurrent.snapshots import copy_states
from blink.kernels.layer_cache import StateCache
from blink.kernels.recurrent import Rows
from blink.kernels.snapshots import SnapshotRows
from blink.models.cache_layout import PerSequence

SHAPES = {"35B-A3B": (16, 32, 128, 128), "27B": (16, 48, 128, 128)}
_ROTATED_BYTES = 600 << 20  # of states, so that nothing stays in L2 from one replay to the next


def draw(shape: tuple[int, int, int, int], tokens: int) -> tuple[DeltaWeights, Projections]:
    """Return random weights and projections in bf16."""
    k_heads, v_heads, k_dim, v_dim = shape
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    conv = (torch.randn(4, channels, device="cuda") * 0.5).bfloat16()
    rate, dt_bias = -torch.rand(v_heads, device="cuda") - 0.3, torch.rand(v_heads, device="cuda") * 4 - 5
    weights = DeltaWeights(conv, rate, dt_bias, torch.rand(v_dim, device="cuda") + 0.5, 1e-6, k_heads, k_dim)
    widths = (channels, v_heads * v_dim, v_heads, v_heads)
    return weights, Projections(*torch.randn(tokens, sum(widths), device="cuda").bfloat16().split(widths, 1))


def make_cache(shape: tuple[int, int, int, int], slots: int) -> StateCache:
    """Return random slots of one layer."""
    k_heads, v_heads, k_dim, v_dim = shape
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    states = torch.randn(slots, v_heads, k_dim, v_dim, device="cuda")
    return StateCache(states, torch.randn(slots, 4, channels, device="cuda").bfloat16())


def make_rows(positions: Sequence[int], counts: Sequence[int]) -> Rows:
    """Return rows in slots of their own numbers."""
    starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
    return Rows(*(torch.tensor(v, dtype=torch.int32, device="cuda") for v in (range(len(counts)), positions, starts)))


def time_graph(calls: Sequence[Callable[[], Any]], repeats: int = 15) -> float:
    """Return the median microseconds of a call, of all replayed one after the other."""
    calls[0]()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), list[float]()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


def time_decode(name: str, counts: Sequence[int], **options: Any) -> None:
    """Print how long a layer's step takes, and a copy of as many bytes as its state has."""
    shape = SHAPES[name]
    for num_rows in counts:
        weights, x = draw(shape, num_rows)
        rows = make_rows([1000] * num_rows, [1] * num_rows)
        layers = max(4, min(256, _ROTATED_BYTES // (num_rows * shape[1] * shape[2] * shape[3] * 4)))
        caches = [make_cache(shape, num_rows) for _ in range(layers)]
        steps = [partial(decode, x, cache, rows, weights, **options) for cache in caches]
        pairs = zip(caches, [*caches[layers // 2 :], *caches[: layers // 2]], strict=True)
        copies = [partial(to.states.copy_, of.states) for to, of in pairs]
        step, copied, moved = time_graph(steps), time_graph(copies), 2 * caches[0].states.nbytes
        print(
            f"decode {name:8} {num_rows:5} rows {step:9.2f} us {moved / step / 1e6:6.2f} TB/s   copy {copied:9.2f} us "
            f"{moved / copied / 1e6:6.2f} TB/s   {copied / step:5.2f} of it",
            flush=True,
        )


@triton.jit
def _recur(q, k, v, decays, states, count, D: tl.constexpr, COLUMNS: tl.constexpr, REPEATS: tl.constexpr):
    """Apply the rule token by token, the state in registers, to q and k [tokens, key heads, D] and v, which the outputs
    replace."""
    block, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, column = tl.arange(0, D), block * COLUMNS + tl.arange(0, COLUMNS)
    home = states + head * D * D + row[:, None] * D + column[None, :]
    state = tl.load(home)
    for token in range(count):
        at, at_k = token * heads + head, (token * (heads // REPEATS) + head // REPEATS) * D
        of_k, of_q = tl.load(k + at_k + row).to(tl.float32), tl.load(q + at_k + row).to(tl.float32)
        state *= tl.exp(tl.load(decays + at))
        update = tl.load(v + at * D + column).to(tl.float32) - tl.sum(state * of_k[:, None], 0)
        state += of_k[:, None] * update[None, :]
        tl.store(v + at * D + column, tl.sum(state * of_q[:, None], 0).to(tl.bfloat16))
    tl.store(home, state)


def time_recurrence(shape: tuple[int, int, int, int], tokens: int) -> float:
    """Return the microseconds of the rule alone, token by token."""
    k_heads, v_heads, dim, _ = shape
    q, k = (torch.randn(tokens, k_heads, dim, device="cuda").bfloat16() / dim**0.5 for _ in range(2))
    v, decays = torch.randn(tokens, v_heads, dim, device="cuda").bfloat16(), -torch.rand(tokens, v_heads, device="cuda")
    states = torch.zeros(v_heads, dim, dim, device="cuda")
    columns = 16
    grid, sizes = (dim // columns, v_heads), {"D": dim, "COLUMNS": columns, "REPEATS": v_heads // k_heads}
    return time_graph([lambda: _recur[grid](q, k, v, decays, states, tokens, **sizes, num_warps=1)], 5)


def time_prompts(name: str, cases: Sequence[Sequence[int]], **options: Any) -> None:
    """Print how long a layer takes for prompts of these lengths, against two floors and the recurrence."""
    shape = SHAPES[name]
    k_heads, v_heads, k_dim, v_dim = shape
    for counts in cases:
        tokens = sum(counts)
        weights, x = draw(shape, tokens)
        cache, rows = make_cache(shape, len(counts)), make_rows([64] * len(counts), counts)
        taken = time_graph([partial(prefill, x, cache, rows, weights, **options)] * 3)
        moved = 2 * tokens * (2 * k_heads * k_dim + 3 * v_heads * v_dim) + 2 * cache.states.nbytes
        chunks = sum(-(-count // 64) for count in counts)
        flops = chunks * v_heads * 2 * 64 * (64 * (3 * k_dim + 2 * v_dim) + 3 * k_dim * v_dim)
        serial = f"{time_recurrence(shape, tokens):9.1f}" if len(counts) == 1 else "-"
        print(
            f"prompt {name:8} {len(counts):3} x {counts[0]:5} {taken:9.1f} us   floors: {moved / 3.0e6:7.1f} us of "
            f"bytes, {flops / 7.8e8:7.1f} of products   token by token {serial}",
            flush=True,
        )


def time_snapshots(name: str, num_rows: int = 32, layers: int = 30) -> None:
    """Print how long the copies of all layers take of some of a step's rows, and of none."""
    k_heads, v_heads, k_dim, v_dim = SHAPES[name]
    sizes, channels = (layers, num_rows + 4), 2 * k_heads * k_dim + v_heads * v_dim
    states = torch.randn(*sizes, v_heads, k_dim, v_dim, device="cuda")
    group = StateCache(states, torch.randn(*sizes, 4, channels, device="cuda").bfloat16())
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    moved = 2 * (states[:, 0].nbytes + group.inputs[:, 0].nbytes)
    for count in (0, 1, 4):
        marks = torch.zeros_like(slots)
        marks[:count] = slots[:count] + 1
        rows = SnapshotRows(marks, slots, num_rows)
        taken = time_graph([partial(copy_states, group, rows, saves=True)] * 8)
        print(
            f"snapshots of {count} of {num_rows} rows {taken:9.2f} us {count * moved / taken / 1e6:6.2f} TB/s",
            flush=True,
        )


def time_drafts(name: str, num_drafts: int) -> None:
    """Print how long a layer's step takes that verifies drafts, after as many were accepted; and a plain one."""
    shape = SHAPES[name]
    k_heads, v_heads, k_dim, v_dim = shape
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    layer = PerSequence(state=(v_heads, k_dim, v_dim), inputs=(4, channels), gates=2 * v_heads, rollback=num_drafts)
    for count in (1, 2, 8, 32):
        num_rows = count * (1 + num_drafts)
        weights, x = draw(shape, num_rows)
        slots, of_group = torch.arange(num_rows) // (1 + num_drafts), torch.arange(num_rows) % (1 + num_drafts)
        lags = torch.where(of_group == 0, num_drafts, 0)
        parts = (slots, 1000 + of_group, torch.arange(num_rows + 1), lags)
        rows = Rows(*(part.to("cuda", torch.int32) for part in parts))
        layers = max(4, min(256, _ROTATED_BYTES // (count * v_heads * k_dim * v_dim * 4)))
        states = [torch.randn(count, v_heads, k_dim, v_dim, device="cuda") for _ in range(layers)]
        kept = [[torch.randn(count, *one, device="cuda").bfloat16() for one in layer.kept] for _ in range(layers)]
        caches = [StateCache(*each) for each in zip(states, *zip(*kept, strict=True), strict=True)]
        taken = time_graph([partial(decode, x, cache, rows, weights) for cache in caches])
        plain_rows, plain_x = make_rows([1000] * count, [1] * count), x.take(slice(0, count))
        plain = [StateCache(each, torch.randn(count, 4, channels, device="cuda").bfloat16()) for each in states]
        usual = time_graph([partial(decode, plain_x, cache, plain_rows, weights) for cache in plain])
        print(
            f"drafts {name:8} {count:5} x {1 + num_drafts} rows {taken:9.2f} us   plain {usual:9.2f} us "
            f"{taken / usual:5.2f} times",
            flush=True,
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="35B-A3B")
    parser.add_argument("--drafts", type=int, default=0, help="time only steps that verify so many for each row")
    options = parser.parse_args()
    name = options.shape
    print(torch.cuda.get_device_name())
    if options.drafts:
        time_drafts(name, options.drafts)
        return
    time_snapshots(name)
    time_decode(name, (1, 2, 4, 8, 16, 32, 64))
    time_prompts(name, ((1,), (64,), (256,), (1024,), (2048,), (4096,), (8192,), (1024,) * 8, (65,) * 32))


if __name__ == "__main__":
    main()
