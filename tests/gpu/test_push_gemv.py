# SPDX-License-Identifier: Apache-2.0
"""GEMVs of several GPUs that push their results to all: the bits of stored ones, and in chains with delayed ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blink import LLM, SamplingParams
from blink.formats.base import matrix_of
from blink.formats.fp8 import FP8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import pack
from blink.formats.schemes import GROUP
from gpu_counts import TWO_GPUS
from gpu_rank_group import SIZES, Delays, Group, draw, draw_same
from quantized_checkpoints import write_checkpoints

pytest.importorskip("cuda.core")

from blink.kernels.gpu.comm import push, spread
from blink.kernels.gpu.comm.all_reduce import GpuRanks
from blink.kernels.gpu.gemm import gemv

pytestmark = [pytest.mark.gpu, TWO_GPUS]

EPS = 1e-5
KINDS = ["bf16", "rows", "groups", "int4"]
SHAPES = [(4096, 2048), (4096, 7168), (5120, 2560), (8192, 3584)]
SIZES_OF_MODEL = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
CHAIN_KINDS, WIDTHS = ["bf16", "rows"], [2048, 4096, 8192]


@pytest.fixture(scope="module", params=SIZES)
def group(request: pytest.FixtureRequest) -> Group:
    group = Group(request.param)
    for end in group.ranks:
        end.spreads_rows = True  # with which norms have the order of pushed ones
    group.end_step()
    group.compile_ahead(lambda rank: compile_gemvs(group, rank))
    return group


def compile_gemvs(group: Group, rank: int) -> None:
    """Compile the GEMVs of all tests, and their sums."""
    end, device = group.ranks[rank], group.devices[rank]
    chains = ((kind, (width, width)) for kind, width in itertools.product(CHAIN_KINDS, WIDTHS))
    for (kind, (n, k)), rows in itertools.product((*itertools.product(KINDS, SHAPES), *chains), (1, 2)):
        weight = draw_weight(kind, n, k)
        if push.refuses(matrix_of(weight), rows) is None:
            x, total = (torch.zeros(rows, size, dtype=torch.bfloat16, device=device) for size in (k, n))
            for part in (end.push, gemv.linear):
                end.add(part(x, weight, None))
                end.add_norm(part(x, weight, None), total, total[0], EPS)


def draw_weight(kind: str, n: int, k: int) -> Any:
    """Return a weight of a format on the current GPU."""
    weight = torch.randn(n, k, device="cuda") * k**-0.5
    if kind == "bf16":
        return weight.bfloat16()
    sizes = (n, 1 if kind == "rows" else k // GROUP)
    scales = ((torch.rand(sizes, device="cuda") + 0.5) * k**-0.5).to(torch.float16).float()
    if kind == "int4":
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        zeros = torch.randint(0, 17, sizes, dtype=torch.uint8, device="cuda")
        return pack([QuantizedMatrix(codes, scales / 4, zeros)])
    return pack([QuantizedMatrix(torch.randn(n, k, device="cuda").to(FP8), scales)])


def draw_weights(group: Group, kind: str, n: int, k: int) -> list[Any]:
    """Return a weight of each rank."""
    weights = list[Any]()
    for rank, device in enumerate(group.devices):
        torch.manual_seed(n + k + rank)
        with torch.cuda.device(device):
            weights.append(draw_weight(kind, n, k))
    return weights


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_pushed_results_have_the_bits_of_stored_ones(group: Group, kind: str, n: int, k: int, rows: int) -> None:
    weights = draw_weights(group, kind, n, k)
    refusal = push.refuses(matrix_of(weights[0]), rows)
    assert refusal is None or kind == "int4", refusal
    if refusal is not None:
        pytest.skip("a GEMV that cannot push")
    inputs, biases = draw(group, (rows, k), torch.bfloat16, 5), draw(group, (n,), torch.bfloat16, 8)
    residual, norms = draw_same(group, (rows, n), 6), draw_same(group, (n,), 7)

    def sum_up(rank: int, *, pushes: bool, has_norm: bool) -> Tensor:
        end, bias = group.ranks[rank], biases[rank] if rank == 0 else None
        multiply, own = end.push if pushes else gemv.linear, residual[rank].clone()
        part = multiply(inputs[rank], weights[rank], bias)
        if not has_norm:
            return end.add(part)
        return torch.cat([end.add_norm(part, own, norms[rank], EPS), own])

    for has_norm in (True, False):
        stored, pushed = (
            group.run(lambda rank, pushes=pushes, has_norm=has_norm: sum_up(rank, pushes=pushes, has_norm=has_norm))
            for pushes in (False, True)
        )
        group.end_step()
        assert all(torch.equal(one.cpu(), stored[0].cpu()) for one in (*stored, *pushed))
    assert group.boxes.read_lost() == [-1] * len(group.ranks)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", CHAIN_KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_chains_of_pushes_with_delayed_ranks_repeat_their_bits(group: Group, width: int, kind: str, rows: int) -> None:
    """Each norm is the next GEMV's input, and memory of a GEMV's input is that of the next norm. The first time the
    host waits."""
    num_exchanges, num_steps = 30, 60
    weights = draw_weights(group, kind, width, width)
    norms = draw_same(group, (width,), 3)
    inputs = draw(group, (rows, width), torch.bfloat16, 7)
    residuals = [torch.zeros_like(one) for one in inputs]

    def exchange(rank: int, number: int, x: Tensor, delays: Delays | None = None) -> Tensor:
        end = group.ranks[rank]
        if delays is not None:
            delays.enqueue()
        part = end.push(x, weights[rank], None)
        if delays is not None and number % 5 == 4:
            delays.enqueue()
        return end.add(part) if number % 7 == 6 else end.add_norm(part, residuals[rank], norms[rank], EPS)

    current = inputs
    for number in range(num_exchanges):
        current = group.run(lambda rank, x=current, number=number: exchange(rank, number, x[rank]))
        group.synchronize()
    group.end_step()
    expected = [(out.clone(), residual.clone()) for out, residual in zip(current, residuals, strict=True)]
    assert all(torch.equal(one.cpu(), expected[0][0].cpu()) for one, _ in expected)
    assert all(torch.isfinite(one).all() for one, _ in expected)
    wrong = [torch.zeros(1, dtype=torch.int64, device=device) for device in group.devices]
    delays = Delays(width + rows)

    def run_step(rank: int) -> None:
        residuals[rank].zero_()
        x = inputs[rank]
        for number in range(num_exchanges):
            x = exchange(rank, number, x, delays)
        wrong[rank].add_((x != expected[rank][0]).sum() + (residuals[rank] != expected[rank][1]).sum())
        group.ranks[rank].end_step(group.failed[rank])

    for rank in range(len(group.ranks)):
        group.compile(rank, run_step)
        wrong[rank].zero_()
    group.launch_graphs(run_step, num_steps)
    assert group.boxes.read_lost() == [-1] * len(group.ranks)
    assert [int(one) for one in wrong] == [0] * len(group.ranks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["plain", "fp8-channel", "packed-head"])
def test_an_engine_that_pushes_gives_the_logprobs_of_one_that_stores(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and two at a time; sums have the same bits."""
    quantized, plain = write_checkpoints(tmp_path, "fp8-channel" if scheme == "plain" else scheme, **SIZES_OF_MODEL)
    pushed = list[Tensor]()
    push_one = GpuRanks.push

    def count(self: GpuRanks, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        pushed.append(push_one(self, x, weight, bias))
        return pushed[-1]

    monkeypatch.setattr(GpuRanks, "push", count)
    monkeypatch.setattr(spread, "HAS_RUN_ON_GPU", True)
    found = list[list[tuple[int, float]]]()
    for pushes in (False, True):
        monkeypatch.setattr(push, "HAS_RUN_ON_GPU", pushes)
        found.append(generate_greedily(plain if scheme == "plain" else quantized))
        assert bool(pushed) == pushes
    assert found[0] == found[1]


def generate_greedily(path: Path) -> list[tuple[int, float]]:
    """Return the tokens of two ranks with their logprobs."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
    options: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 128, "num_gpu_blocks_override": 64}
    options |= {"device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True, "tensor_parallel_size": 2}
    with LLM(model=str(path), **options) as llm:
        prompts = [[5, 9, 31], [77, 12, 4, 8, 60]]
        outputs = [*llm.generate(prompts[:1], params, use_tqdm=False), *llm.generate(prompts, params, use_tqdm=False)]
    found = list[tuple[int, float]]()
    for output in outputs:
        [choice] = output.outputs
        assert choice.logprobs is not None
        pairs = zip(choice.token_ids, choice.logprobs, strict=True)
        found += [(token, logprobs[token].logprob) for token, logprobs in pairs]
    return found
