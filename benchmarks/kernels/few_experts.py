# SPDX-License-Identifier: Apache-2.0
"""Time the experts of up to 256 rows with weights of each kind, in the shape of Qwen3-30B-A3B.

From the residual to the next norm, the kernels of few rows and the grouped GEMMs; without norms, what the general
step takes and Triton's GEMMs alone. Chains over several layers' weights; medians of replays.

Run with: python benchmarks/kernels/few_experts.py [--rows 1 2 4 8] [--formats bf16 fp8 fp8-block int4] [--layers 8]
    [--split TOKENS GROUPS BOXES BLOCKS]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from decode_layer import draw, time_graph

import blink.kernels.gpu.moe.grouped as triton_moe
from blink.formats.experts import ExpertWeights, Fp8Experts, PackedExperts, experts_of
from blink.formats.fp8 import FP8
from blink.formats.schemes import FormatId
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.launch import compile_ahead
from blink.kernels.gpu.moe import decode as moe
from blink.kernels.gpu.moe import grouped_gemm, permuted_experts
from blink.kernels.gpu.moe.decode_grouped import Mixture, add_grouped_experts
from blink.kernels.gpu.moe.grouped_gemm import GroupedGemmConfig

NUM_EXPERTS, TOP_K, HIDDEN, SIZE = 128, 8, 2048, 768
EPS = 1e-6
Matrices = Callable[[int, int], ExpertWeights]  # of so many rows and columns
Layer = tuple[ExpertWeights, ExpertWeights]


def draw_fp8(rows: int, columns: int) -> Fp8Experts:
    scales = torch.full((NUM_EXPERTS, rows), 0.01, device="cuda")
    return Fp8Experts(draw(NUM_EXPERTS, rows, columns).to(FP8), scales)


def draw_packed(form: FormatId) -> Matrices:
    def draw_matrices(rows: int, columns: int) -> PackedExperts:
        experts = PackedExperts.allocate(form, (NUM_EXPERTS, rows, columns)).to(torch.device("cuda"))
        experts.values.random_(0, 96)
        experts.groups.fill_(0x3C23D70A if form is FormatId.FP8 else -0x3CF7E2E1)  # 0.01; 0.005, zero point 8
        return experts

    return draw_matrices


FORMATS: dict[str, Matrices] = {
    "bf16": lambda rows, columns: draw(NUM_EXPERTS, rows, columns),
    "fp8": draw_fp8,
    "fp8-block": draw_packed(FormatId.FP8),
    "int4": draw_packed(FormatId.INT4),
}


class Case:
    """Rows with their routers' logits, and the ways to run a layer's experts on them."""

    def __init__(self, rows: int) -> None:
        self.rows, self.norm = rows, 1 + draw(HIDDEN)
        self.residual, self.logits = draw(rows, HIDDEN), torch.randn(rows, NUM_EXPERTS, device="cuda").bfloat16()
        self.context_lens = torch.ones(rows, dtype=torch.int32, device="cuda")
        self.num_tokens = torch.tensor([rows], dtype=torch.int32, device="cuda")
        self.inverse_rms = torch.ones(rows, device="cuda")
        self.routes = moe.Routes(self.logits, self.context_lens, TOP_K, True)

    @property
    def num_chosen(self) -> int:
        return self.logits.topk(TOP_K).indices.unique().numel()

    def are_permuted(self, layer: Layer) -> bool:
        """Tell whether the GEMMs of rows that are copied to their experts take a layer."""
        return grouped_gemm.refuses(experts_of(*layer, TOP_K), self.rows) is None

    def add_few(self, layers: list[Layer]) -> None:
        for gate_up, down in layers:
            gated = moe.gate_experts(self.residual, self.norm, EPS, gate_up, self.routes)
            moe.down_normed_experts(gated, down, self.routes, self.residual, self.norm)

    def add_grouped(self, layers: list[Layer]) -> None:
        x = self.residual.clone()
        for gate_up, down in layers:
            x = add_grouped_experts(
                self.residual, x, self.inverse_rms, self.logits, Mixture(gate_up, down, TOP_K, renormalize=True),
                self.num_tokens, self.norm, permuted=self.are_permuted((gate_up, down)),
            ).x  # fmt: skip

    def run_general(self, layers: list[Layer]) -> None:
        if not self.are_permuted(layers[0]):
            self.run_triton(layers)
            return
        for weights in layers:
            permuted_experts.moe(self.residual, self.logits, weights, self.num_tokens, top_k=TOP_K, renormalize=True)

    def run_triton(self, layers: list[Layer]) -> None:
        for weights in layers:
            triton_moe.moe(self.residual, self.logits, *weights, self.num_tokens, top_k=TOP_K, renormalize=True)

    def list_candidates(self) -> tuple[Callable[[list[Layer]], None] | None, ...]:
        """Return the ways in the table's order; None: there is none for so many rows."""
        few = self.add_few if self.rows <= moe.MAX_ROWS else None
        return few, self.add_grouped if self.rows <= gemm.MAX_ROWS else None, self.run_general, self.run_triton

    def time(self, layers: list[Layer]) -> str:
        """Return the table's columns of each way's microseconds a layer."""
        self.residual.normal_()  # compile_ahead() added what memory held
        times = (way and time_graph(lambda way=way: way(layers)) / len(layers) for way in self.list_candidates())
        return "".join(f"{'-':>8}" if time is None else f"{time:8.2f}" for time in times)


def main() -> None:
    """Print a table of microseconds a layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--split", type=int, nargs=4, help="of the grouped products, in place of what they choose")
    options = parser.parse_args()
    if options.split:
        grouped_gemm.choose_config = lambda *_, **__: GroupedGemmConfig(*options.split)
    cases = [Case(rows) for rows in options.rows]
    candidates = "".join(f"{way:>8}" for way in ("few", "grouped", "general", "Triton"))
    print(f"{'us a layer':12} {'rows':>4} {'experts':>7} {'MB':>6}{candidates}", flush=True)
    for form in options.formats:
        draw_matrices = FORMATS[form]
        layers = [(draw_matrices(2 * SIZE, HIDDEN), draw_matrices(HIDDEN, SIZE)) for _ in range(options.layers)]
        num_bytes = {"bf16": 2, "int4": 0.5}.get(form, 1) * 3 * HIDDEN * SIZE
        compile_ahead(
            lambda layers=layers: [way(layers[:1]) for case in cases for way in case.list_candidates() if way]
        )
        for case in cases:
            size = case.num_chosen * num_bytes / 1e6
            print(f"{form:12} {case.rows:4} {case.num_chosen:7} {size:6.1f}{case.time(layers)}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
