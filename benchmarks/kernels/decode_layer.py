# SPDX-License-Identifier: Apache-2.0
"""Time the kernels of decoding rows against cuBLAS and the Triton kernels, in the shape of Llama-3-8B.

First the whole step as one graph, then chains of one kernel over all layers' weights; medians of replays.

Run with: python benchmarks/kernels/decode_layer.py [--rows 1 2 4 8 16 32 64 96 128] [--context 300] [--step-only]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import blink.models
from blink.formats.base import Weight
from blink.kernels.activation import activate
from blink.kernels.attention import paged_attention, plan_attention
from blink.kernels.batch import Batch, Header
from blink.kernels.gpu.attention import decode as decode_attention_module
from blink.kernels.gpu.attention.decode import decode_attention
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import gemm_kernel, gemv
from blink.kernels.gpu.gemm.tile_configs import bucket_rows
from blink.kernels.gpu.launch import launch
from blink.kernels.layer_cache import KvCache, LayerCache
from blink.kernels.operands import HeadNorm
from blink.kernels.rms_norm import rms_norm
from blink.kernels.rotary import rotate_and_store
from blink.models.decoder import Decoder
from blink.models.layer_weights import DenseWeights, LayerWeights, MoeWeights
from blink.models.layers import Attention
from blink.models.mlps import MoeMlp
from blink.models.spec import ModelSpec
from blink.models.weights.source import read_spec
from blink.plan.site import Bucket
from blink.runner import gpu_device
from blink.runner.matmul import linear
from blink.runner.run import Runner

CONFIGS = Path(blink.models.__file__).parent / "configs"
BLOCK_SIZE = 16
BANDWIDTH = 4.5e6  # bytes per us that reads reach on an H200
_REPLAYS_AT_ONCE = 50  # that the host is ahead of the GPU
Run = Callable[[], object]
Product = Callable[[Weight], object]


def draw(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)


def make_mlp(spec: ModelSpec) -> DenseWeights | MoeWeights:
    hidden, mlp = spec.hidden_size, spec.layers[0].mlp
    size = mlp.size
    if not isinstance(mlp, MoeMlp):
        return DenseWeights(draw(2 * size, hidden), draw(hidden, size))
    count = mlp.experts
    return MoeWeights(mlp, draw(count, hidden), draw(count, 2 * size, hidden), draw(count, hidden, size))


def attention_of(spec: ModelSpec) -> Attention:
    """Return a model's attention, which all layers have alike."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention), "models with recurrent layers have a benchmark of their own"
    return mixer


def make_layer(spec: ModelSpec) -> LayerWeights:
    hidden, attention = spec.hidden_size, attention_of(spec)
    has_norm, head_dim = attention.qk_norm == "head", attention.head_dim
    return LayerWeights(
        attention_norm=1 + draw(hidden),
        qkv=draw(attention.q_size + 2 * attention.kv_size, hidden),
        qkv_bias=None,
        output=draw(hidden, attention.q_size),
        output_bias=None,
        head_norm=HeadNorm(1 + draw(head_dim), 1 + draw(head_dim), 1e-6) if has_norm else None,
        mlp_norm=1 + draw(hidden),
        mlp=make_mlp(spec),
    )


class Model:
    """Random weights of all layers, which are equal; they serve both sets of kernels."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.layers = [make_layer(spec) for _ in range(spec.num_layers)]
        self.embedding, self.lm_head = draw(spec.vocab_size, spec.hidden_size), draw(spec.vocab_size, spec.hidden_size)
        self.norm = 1 + draw(spec.hidden_size)
        self.decoder = Decoder(spec, self.embedding, self.layers, self.norm, self.lm_head)
        [self.table] = self.decoder.rotary_tables


def draw_cache(decoder: Decoder, num_blocks: int) -> KvCache:
    cache = decoder.allocate_kv_cache(num_blocks, BLOCK_SIZE)
    for layer in cache:
        layer.cells.normal_()
    return cache


class Case:
    """One batch of decoding rows with its KV cache, and the two ways to run a step."""

    def __init__(self, model: Model, rows: int, context: int, *, varied: bool = False) -> None:
        self.model, self.rows, self.context = model, rows, context
        longest = 2 * context if varied else context
        blocks = -(-longest // BLOCK_SIZE)
        self.batch = make_batch(rows, longest, blocks, model.spec.vocab_size)
        if varied:
            vary_contexts(self.batch)
        self.cache = draw_cache(model.decoder, rows * blocks)
        self._before, self._after = Runner(model.decoder), Runner(model.decoder)

    def run_before(self) -> Tensor:
        with mock.patch.object(gpu_device, "MAX_MIXED_TOKENS", 0):
            return self._before.compute_logits(self.batch, self.cache, Bucket(self.rows, self.rows))

    def run_after(self) -> Tensor:
        return self._after.compute_logits(self.batch, self.cache, Bucket(self.rows, self.rows, decoding=True))

    @property
    def step_bytes(self) -> int:
        matrices = [m for layer in self.model.layers for m in (layer.qkv, layer.output, *mlp_weights(layer))]
        return sum(map(count_bytes, [*matrices, self.model.lm_head])) + self.kv_bytes * len(self.model.layers)

    @property
    def kv_bytes(self) -> int:
        return self.rows * self.context * attention_of(self.model.spec).kv_size * 2 * 2


def count_bytes(weight: Weight) -> int:
    """Return the bytes of a weight in 16 bits."""
    return math.prod(weight.shape) * 2


def mlp_weights(layer: LayerWeights) -> tuple[Weight, Weight]:
    assert isinstance(layer.mlp, DenseWeights)
    return layer.mlp.gate_up, layer.mlp.down


def make_batch(rows: int, context: int, blocks: int, vocab_size: int) -> Batch:
    batch = Batch.allocate(
        max_tokens=rows, max_rows=rows, num_slots=rows, max_blocks=blocks, max_model_len=context, device="cuda"
    )
    batch.header[Header.NUM_ROWS] = batch.header[Header.NUM_TOKENS] = batch.header[Header.NUM_DECODE_ROWS] = rows
    batch.input_ids.random_(vocab_size)
    batch.query_starts.copy_(torch.arange(rows + 1))
    batch.row_slots.copy_(torch.arange(rows))
    batch.block_tables.copy_(torch.randperm(rows * blocks).view(rows, blocks))
    set_contexts(batch, batch.context_lens.new_full((rows,), context))
    return batch


def set_contexts(batch: Batch, lengths: Tensor) -> None:
    """Give each row of a batch a context of so many tokens, the new one included."""
    batch.context_lens.copy_(lengths)
    batch.positions.copy_(lengths - 1)
    last = batch.block_tables.gather(1, (lengths.long()[:, None] - 1) // BLOCK_SIZE)[:, 0]
    batch.kv_slots.copy_(last * BLOCK_SIZE + (lengths - 1) % BLOCK_SIZE)


def vary_contexts(batch: Batch) -> None:
    """Give rows, in no order, contexts evenly spread from none to what they have: half as much in all."""
    rows, longest = len(batch.context_lens), int(batch.context_lens[0])
    lengths = (longest * (torch.randperm(rows) + 0.5) / rows).int().clamp(min=1).to(batch.context_lens.device)
    set_contexts(batch, lengths)


def capture_graph(run: Run) -> torch.cuda.CUDAGraph:
    """Capture what `run` launches, whose kernels are loaded by a first run."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_graph(run: Run, replays: int = 9) -> float:
    """Return the median microseconds of a replay of what `run` launches, replays following one another.

    It ends before a GPU that such load brings to its limit of power has lowered its clock: see time_under_load().
    """
    graph = capture_graph(run)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(3):
        graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e3


def time_under_load(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Return the mean microseconds of replays that follow one another for so long."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replays, start = 0, time.monotonic()
    begin.record()
    while time.monotonic() - start < seconds:
        for _ in range(_REPLAYS_AT_ONCE):
            graph.replay()
        replays += _REPLAYS_AT_ONCE
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays


def each_layer(case: Case, run: Callable[[LayerWeights, LayerCache], object]) -> Run:
    def run_all() -> None:
        for layer, cache in zip(case.model.layers, case.cache, strict=True):
            run(layer, cache)

    return run_all


Part = tuple[str, int, Run, Run]  # name, bytes, and chains over all layers with either set of kernels


def attention_part(case: Case) -> Part:
    model, batch, rows, attention = case.model, case.batch, case.rows, attention_of(case.model.spec)
    qkv, rotation = draw(rows, attention.q_size + 2 * attention.kv_size), model.table[batch.positions]

    def attend_before() -> None:
        plan = plan_attention(batch, rows, rows, [attention], case.cache[0])
        for layer, cache in zip(model.layers, case.cache, strict=True):
            paged_attention(rotate_and_store(qkv, rotation, batch.kv_slots, cache, layer.head_norm), cache, plan)

    def attend(layer: LayerWeights, cache: LayerCache) -> None:
        decode_attention(qkv, cache, batch, model.table, layer.head_norm)

    return "rotary, attention", case.kv_bytes, attend_before, each_layer(case, attend)


def gemm_parts(case: Case) -> Iterator[Part]:
    model, spec, rows, eps = case.model, case.model.spec, case.rows, case.model.spec.rms_norm_eps
    x, residual, norm = draw(rows, spec.hidden_size), draw(rows, spec.hidden_size), model.norm
    attended, act = draw(rows, attention_of(spec).q_size), draw(rows, spec.layers[0].mlp.size)
    tokens = bucket_rows(rows, plain=True)
    _, normed = gemm.embed(case.batch.input_ids[:rows], model.embedding, norm, tokens=tokens)

    def part(name: str, weight: Callable[[LayerWeights], Weight], before: Product, few: Product, many: Product) -> Part:
        def chain(product: Product) -> Run:
            return each_layer(case, lambda layer, _: product(weight(layer)))

        num_bytes = count_bytes(weight(model.layers[0]))
        return name, num_bytes, chain(before), chain(few if rows <= gpu_device.MAX_GEMV_ROWS else many)

    yield part(
        "norm, qkv", lambda layer: layer.qkv,
        lambda weight: linear(rms_norm(x, norm, eps, residual), weight),
        lambda weight: gemv.normed_linear(x, norm, eps, weight),
        lambda weight: gemm.normed_linear(normed, eps, weight),
    )  # fmt: skip
    yield part(
        "norm, gate/up, silu", lambda layer: mlp_weights(layer)[0],
        lambda weight: activate(linear(rms_norm(x, norm, eps, residual), weight)),
        lambda weight: gemv.gated_linear(x, norm, eps, weight),
        lambda weight: gemm.gated_linear(normed, eps, weight),
    )  # fmt: skip
    for name, weight, source in (
        ("output, add", lambda layer: layer.output, attended),
        ("down, add", lambda layer: mlp_weights(layer)[1], act),
    ):
        yield part(
            name, weight,
            functools.partial(linear, source),
            lambda weight, source=source: gemv.add_linear(source, weight, residual),
            lambda weight, source=source: gemm.add_linear(source, weight, residual, norm, tokens=tokens),
        )  # fmt: skip


def without_overlap(run: Run) -> float:
    """Time a chain whose kernels start only when the one in front has ended."""

    def launch_alone(*args: Any, **options: Any) -> None:
        launch(*args, **options, pdl=False)

    gemv.launch = gemm.launch = gemm_kernel.launch = decode_attention_module.launch = launch_alone
    try:
        return time_graph(run)
    finally:
        gemv.launch = gemm.launch = gemm_kernel.launch = decode_attention_module.launch = launch


def report_step(case: Case) -> None:
    before, after = case.run_before().float(), case.run_after().float()
    error = float((before - after).norm() / before.norm())
    old, new = time_graph(case.run_before), time_graph(case.run_after)
    rates = [f"{case.step_bytes / time / 1e6:.2f} TB/s" for time in (old, new)]
    print(
        f"{case.rows} rows, context {case.context}: before {old:.1f} us ({rates[0]}), after {new:.1f} us ({rates[1]}, "
        f"{case.step_bytes / new / BANDWIDTH:.0%} of {BANDWIDTH / 1e6} TB/s); logits differ by {error:.1e}",
        flush=True,
    )


def report_parts(case: Case) -> None:
    print(f"   {'us a layer':20} {'MB':>6} {'before':>7} {'alone':>7} {'after':>7} {'TB/s':>6}")
    layers = len(case.model.layers)
    for name, num_bytes, before, after in (attention_part(case), *gemm_parts(case)):
        times = [time / layers for time in (time_graph(before), without_overlap(after), time_graph(after))]
        rate = num_bytes / times[2] / 1e6
        print(
            f"   {name:20} {num_bytes / 1e6:6.1f} {times[0]:7.2f} {times[1]:7.2f} {times[2]:7.2f} {rate:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 96, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[300])
    parser.add_argument("--step-only", action="store_true", help="leave the single kernels out")
    options = parser.parse_args()
    with torch.inference_mode():
        llama = Model(read_spec(CONFIGS / "llama-3-8b").limit(8192))
        for length in options.context:
            for count in options.rows:
                measured = Case(llama, count, length)
                report_step(measured)
                if not options.step_only:
                    report_parts(measured)
