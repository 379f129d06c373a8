# SPDX-License-Identifier: Apache-2.0
"""Time the kernels of decoding rows against cuBLAS and the Triton kernels, in the shape of Qwen3-30B-A3B.

First the whole step as one graph, then, up to 8 rows, chains of one kernel over all layers' weights; medians of
replays. Weights and tokens are random, so experts are chosen about evenly; how many are is part of the report.

Run with: python benchmarks/kernels/decode_moe_layer.py [--rows 1 2 4 8 32] [--context 300] [--layers 48] [--step-only]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from decode_layer import BANDWIDTH, BLOCK_SIZE, CONFIGS, Model, Run, draw, draw_cache, make_batch, time_graph
from torch import Tensor

from blink.kernels.attention import paged_attention, plan_attention
from blink.kernels.gpu.attention import decode as decode_attention_module
from blink.kernels.gpu.attention.decode import decode_attention
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import gemv
from blink.kernels.gpu.gemm.gemv import add_linear, normed_linear
from blink.kernels.gpu.launch import launch
from blink.kernels.gpu.moe import decode as moe
from blink.kernels.gpu.moe.grouped import moe as triton_moe
from blink.kernels.layer_cache import LayerCache
from blink.kernels.rms_norm import rms_norm
from blink.kernels.rotary import rotate_and_store
from blink.models.layer_weights import LayerWeights, MoeWeights
from blink.models.weights.source import read_spec
from blink.plan.site import Bucket
from blink.runner import gpu_streams
from blink.runner.matmul import linear
from blink.runner.run import Runner


def mixture(layer: LayerWeights) -> MoeWeights:
    assert isinstance(layer.mlp, MoeWeights)
    return layer.mlp


class Case:
    """One batch of decoding rows with its KV cache, and the two ways to run a step."""

    def __init__(self, model: Model, rows: int, context: int) -> None:
        self.model, self.rows, self.context = model, rows, context
        blocks = -(-context // BLOCK_SIZE)
        self.batch = make_batch(rows, context, blocks, model.spec.vocab_size)
        self.cache = draw_cache(model.decoder, rows * blocks)
        self._runner = Runner(model.decoder)

    def run_before(self) -> Tensor:
        return self._runner.compute_logits(self.batch, self.cache, Bucket(self.rows, self.rows))

    def run_after(self) -> Tensor:
        return self._runner.compute_logits(self.batch, self.cache, Bucket(self.rows, self.rows, decoding=True))

    def count_experts(self) -> float:
        """Return how many experts all rows together choose, the mean over the layers."""
        counts: list[int] = []
        top_k = mixture(self.model.layers[0]).spec.router.top_k

        def count(router_logits: Tensor) -> None:
            counts.append(router_logits.topk(top_k).indices.unique().numel())

        def gate_and_count(*args: Any, **options: Any) -> Tensor:
            count(args[4].logits)
            return gate_experts(*args, **options)

        def add_and_count(*args: Any, **options: Any) -> gemm.NormInput:
            count(args[3])
            return add_grouped_experts(*args, **options)

        gate_experts, add_grouped_experts = moe.gate_experts, gpu_streams.add_grouped_experts
        moe.gate_experts, gpu_streams.add_grouped_experts = gate_and_count, add_and_count
        try:
            self.run_after()
        finally:
            moe.gate_experts, gpu_streams.add_grouped_experts = gate_experts, add_grouped_experts
        return sum(counts) / len(counts)

    def step_bytes(self, num_experts: float) -> float:
        layers, spec = self.model.layers, self.model.spec
        first = layers[0]
        dense = first.qkv.numel() + first.output.numel() + mixture(first).router.numel()
        expert = 3 * spec.hidden_size * mixture(first).spec.size
        weights = len(layers) * (dense + num_experts * expert) + self.model.lm_head.numel()
        return 2 * weights + self.kv_bytes * len(layers)

    @property
    def kv_bytes(self) -> int:
        return self.rows * self.context * self.model.spec.layers[0].mixer.kv_size * 2 * 2


def each_layer(case: Case, run: Callable[[LayerWeights, LayerCache], object]) -> Run:
    def run_all() -> None:
        for layer, cache in zip(case.model.layers, case.cache, strict=True):
            run(layer, cache)

    return run_all


def attention_parts(case: Case) -> Iterator[tuple[str, float, Run, Run]]:
    model, spec, batch, rows = case.model, case.model.spec, case.batch, case.rows
    eps, attention = spec.rms_norm_eps, spec.layers[0].mixer
    x, residual, wide = draw(rows, spec.hidden_size), draw(rows, spec.hidden_size), draw(rows, attention.q_size)
    qkv, first = draw(rows, attention.q_size + 2 * attention.kv_size), model.layers[0]
    rotation = model.table[batch.positions]

    def attend_before() -> None:
        plan = plan_attention(batch, rows, rows, [attention], case.cache[0])
        for layer, cache in zip(model.layers, case.cache, strict=True):
            query = rotate_and_store(qkv, rotation, batch.kv_slots, cache, layer.head_norm)
            paged_attention(query, cache, plan)

    yield (
        "norm, qkv", first.qkv.nbytes,
        each_layer(case, lambda layer, _: linear(rms_norm(x, layer.attention_norm, eps, residual), layer.qkv)),
        each_layer(case, lambda layer, _: normed_linear(x, layer.attention_norm, eps, layer.qkv)),
    )  # fmt: skip
    yield (
        "rotary, attention", case.kv_bytes, attend_before,
        each_layer(case, lambda layer, cache: decode_attention(qkv, cache, batch, model.table, layer.head_norm)),
    )  # fmt: skip
    yield (
        "output, add", first.output.nbytes,
        each_layer(case, lambda layer, _: linear(wide, layer.output)),
        each_layer(case, lambda layer, _: add_linear(wide, layer.output, residual)),
    )  # fmt: skip


def expert_parts(case: Case) -> Iterator[tuple[str, float, Run, Run]]:
    model, spec, batch, rows = case.model, case.model.spec, case.batch, case.rows
    first, eps = mixture(model.layers[0]), spec.rms_norm_eps
    top_k = first.spec.router.top_k
    x, residual = draw(rows, spec.hidden_size), draw(rows, spec.hidden_size)
    logits = normed_linear(x, model.norm, eps, first.router)
    routes = moe.Routes(logits, batch.context_lens, top_k, renormalize=True)
    chosen = logits.topk(top_k).indices.unique().numel()
    act = moe.gate_experts(x, model.norm, eps, first.gate_up, routes)
    num_tokens = torch.tensor([rows], dtype=torch.int32, device="cuda")

    def mix_before(layer: LayerWeights, _: LayerCache) -> None:
        mlp = mixture(layer)
        triton_moe(x, logits, mlp.gate_up, mlp.down, num_tokens, top_k=top_k, renormalize=True)

    def mix_after(layer: LayerWeights, _: LayerCache) -> None:
        mlp = mixture(layer)
        moe.down_experts(moe.gate_experts(x, layer.mlp_norm, eps, mlp.gate_up, routes), mlp.down, routes, residual)

    yield (
        "norm, router", first.router.nbytes,
        each_layer(case, lambda layer, _: linear(rms_norm(x, layer.mlp_norm, eps, residual), mixture(layer).router)),
        each_layer(case, lambda layer, _: normed_linear(x, layer.mlp_norm, eps, mixture(layer).router)),
    )  # fmt: skip
    yield (
        "route, experts, sum", chosen * (first.gate_up[0].nbytes + first.down[0].nbytes),
        each_layer(case, mix_before), each_layer(case, mix_after),
    )  # fmt: skip
    for name, weight, run in (
        ("  gate/up, silu", first.gate_up, lambda layer, _: moe.gate_experts(
            x, layer.mlp_norm, eps, mixture(layer).gate_up, routes)),
        ("  down, sum, add", first.down, lambda layer, _: moe.down_experts(act, mixture(layer).down, routes, residual)),
    ):  # fmt: skip
        yield name, chosen * weight[0].nbytes, lambda: None, each_layer(case, run)


def without_overlap(run: Run) -> float:
    """Time a chain whose kernels start only when the one in front has ended."""
    modules = (gemv, gemm, moe, decode_attention_module)
    for module in modules:
        module.launch = functools.partial(launch, pdl=False)
    try:
        return time_graph(run)
    finally:
        for module in modules:
            module.launch = launch


def report_step(case: Case) -> None:
    num_experts = case.count_experts()
    before, after = case.run_before().float(), case.run_after().float()
    error = float((before - after).norm() / before.norm())
    old, new = time_graph(case.run_before), time_graph(case.run_after)
    num_bytes = case.step_bytes(num_experts)
    print(
        f"{case.rows} rows, context {case.context}, {num_experts:.1f} experts a layer: before {old:.1f} us, after "
        f"{new:.1f} us; {num_bytes / 1e9:.2f} GB, {num_bytes / new / 1e6:.2f} TB/s, {num_bytes / new / BANDWIDTH:.0%} "
        f"of {BANDWIDTH / 1e6} TB/s; logits differ by {error:.1e}",
        flush=True,
    )


def report_parts(case: Case) -> None:
    print(f"   {'us a layer':20} {'MB':>6} {'before':>7} {'alone':>7} {'after':>7} {'TB/s':>6}")
    layers = len(case.model.layers)
    for name, num_bytes, before, after in (*attention_parts(case), *expert_parts(case)):
        old = 0.0 if name.startswith(" ") else time_graph(before)
        times = [time / layers for time in (old, without_overlap(after), time_graph(after))]
        rate = num_bytes / times[2] / 1e6
        print(
            f"   {name:20} {num_bytes / 1e6:6.1f} {times[0]:7.2f} {times[1]:7.2f} {times[2]:7.2f} {rate:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[300])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--step-only", action="store_true", help="leave the single kernels out")
    options = parser.parse_args()
    with torch.inference_mode():
        spec = read_spec(CONFIGS / "qwen3-30b-a3b").limit(8192)
        qwen = Model(dataclasses.replace(spec, layers=spec.layers[: options.layers]))
        for length in options.context:
            for count in options.rows:
                measured = Case(qwen, count, length)
                report_step(measured)
                if not options.step_only and count <= moe.MAX_ROWS:
                    report_parts(measured)
