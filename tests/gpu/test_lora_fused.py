# SPDX-License-Identifier: Apache-2.0
"""GEMMs that add adapters' updates to their own sums, against plain references; kernels that overlap must not race."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_decode_kernels import EPS, draw, error, make_batch, make_decoder, norm_of, on_gpu, pad
from test_lora_engine import open_llm
from test_lora_steps import NUM_ADAPTERS, hold_adapters
from test_lora_update import draw_updates, expect, make_adapters

from blink import LLM, LoRARequest, SamplingParams
from blink.kernels.batch import Batch, Param
from blink.kernels.cpu.activation import activate
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm.gemm_kernel import GemmUpdate
from blink.kernels.gpu.launch import compile_ahead, launch
from blink.kernels.gpu.lora import few_tokens, fused
from blink.kernels.lora import WeightParts
from blink.models.weights.source import read_spec
from blink.plan.execution_plan import NormStyle
from blink.plan.site import Bucket
from blink.runner.gpu_device import GpuDevice
from blink.runner.planner import plan_step
from blink.runner.run import Runner
from blink.runner.sites import expected_sites
from lora_adapters import find_targets, write_adapter
from model_driver import set_params
from model_families import save_model
from model_specs import clone_cache, fill_cache

pytestmark = pytest.mark.skipif(not has_warpgroups(), reason="needs the warpgroup products of Hopper")

QKV = (slice(0, 512), slice(512, 640), slice(640, 784))  # of parts that begin at multiples of 16 alone
GATE_UP = (slice(0, 352), slice(352, 704))
WHOLE = (slice(0, 416),)
MANY = 20  # adapters: more than have blocks of their own
LISTS = [
    (1, [1]),
    (3, [0, 2]),
    (8, [1, 2, 3, 4, 5, 6, 7, 8]),
    (9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    (16, [3]),
    (17, [0, 0, 5]),
    (24, [2, 7, 0]),
    (31, [4, 0, 4, 4, 1, 8, 2]),
    (32, [1, 2, 3, 4, 5, 6, 7, 8]),
    (32, [0]),
    (48, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    (64, [*range(MANY + 1)]),
]


class Product:
    """A weight with adapters, of which each row of some has one or none."""

    def __init__(self, rows: int, own: Sequence[int], rank: int, parts: Sequence[slice], k: int) -> None:
        torch.manual_seed(rows)
        shape = WeightParts((parts[-1].stop, k), tuple(parts))
        self.weight, self._shape = draw(*shape.shape, scale=k**-0.5), shape
        self._held = [{id(self.weight): draw_updates(shape, rank, seed)} for seed in range(max(*own, 1))]
        like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
        self._stacks = make_adapters({id(self.weight): shape}, self._held, rank, like, pages=False).stacks
        self._of_rows = torch.tensor(list(itertools.islice(itertools.cycle(own), rows)))
        self.is_free = (self._of_rows == 0).cuda()
        self._places = self._of_rows.int().cuda()

    def begin(self, x: Tensor) -> GemmUpdate | None:
        """Launch shrink; what it leaves undefined is not a number."""
        updates = fused.FusedUpdates(self._stacks, self._places, few_tokens.list_adapters(self._places))
        with patch.object(torch, "empty", lambda *shape, **options: torch.full(shape, torch.nan, **options)):
            return updates.begin(x, self.weight)

    def spoil(self, adapter: int) -> None:
        """Make an adapter's numbers none."""
        for stack in self._stacks.values():
            stack.down[adapter], stack.up[adapter] = torch.nan, torch.nan

    def expect(self, x: Tensor) -> Tensor:
        """Return the sums in float32."""
        base, key = x.float() @ self.weight.float().T, id(self.weight)
        return expect(x.cpu(), base.cpu(), self._of_rows, self._held, self.weight, key).cuda()


def check_store(rows: int, own: Sequence[int], rank: int) -> None:
    product = Product(rows, own, rank, QKV, 1056)
    x, norm_weight, bias = draw(rows, 1056), draw(1056), draw(784)
    normed, rates = norm_of(x, norm_weight), (x.float().square().mean(1, keepdim=True) + EPS).rsqrt()
    plain = gemm.normed_linear(normed, EPS, product.weight, bias)
    found = gemm.normed_linear(normed, EPS, product.weight, bias, update=product.begin(normed.x))
    check(product, plain, found, product.expect(normed.x) * rates + bias.float())


def check_gate(rows: int, own: Sequence[int], rank: int) -> None:
    product = Product(rows, own, rank, GATE_UP, 4096)
    x, norm_weight = draw(rows, 4096), draw(4096)
    normed, rates = norm_of(x, norm_weight), (x.float().square().mean(1, keepdim=True) + EPS).rsqrt()
    plain = gemm.gated_linear(normed, EPS, product.weight)
    found = gemm.gated_linear(normed, EPS, product.weight, update=product.begin(normed.x))
    check(product, plain, found, activate(product.expect(normed.x) * rates))


def check_add(rows: int, own: Sequence[int], rank: int) -> None:
    product = Product(rows, own, rank, WHOLE, 6176)
    x, residual, next_norm, bias = draw(rows, 6176), draw(rows, 416), draw(416), draw(416)
    plain, found = residual.clone(), residual.clone()
    gemm.add_linear(x, product.weight, plain, next_norm, bias, tokens=pad(rows))
    update = product.begin(x)
    following = gemm.add_linear(x, product.weight, found, next_norm, bias, tokens=pad(rows), update=update)
    check(product, plain, found, product.expect(x) + residual.float() + bias.float())
    assert error(following.x, found.float() * next_norm.float()) < 1e-2
    assert error(following.square_sums.sum(0)[:rows], found.float().square().sum(1)) < 1e-4


def check(product: Product, plain: Tensor, found: Tensor, expected: Tensor) -> None:
    """Check results; rows without an adapter have the bits of a GEMM that adds nothing."""
    assert error(found, expected) < 1e-2
    assert torch.equal(found[product.is_free], plain[product.is_free])
    for row in (~product.is_free).nonzero()[:, 0].tolist():
        assert error(found[row], expected[row]) < 2e-2 < 0.1 < error(plain[row], expected[row])


CHECKS = [check_store, check_gate, check_add]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile all kernels at once; what they would compute is not there yet."""

    def run() -> None:
        for rows, check_one in itertools.product((8, 16, 24, 32, 48, 64), CHECKS):
            try:
                check_one(rows, [1], 16)
            except AssertionError:
                continue

    compile_ahead(run)


RANKS = [*((*one, 16) for one in LISTS), *((*LISTS[place], rank) for place in (3, 8) for rank in (8, 32, 64, 128))]


@pytest.mark.parametrize(("rows", "own", "rank"), RANKS)
@pytest.mark.parametrize("check_one", CHECKS)
def test_products_with_updates_equal_the_reference(check_one: Any, rows: int, own: list[int], rank: int) -> None:
    check_one(rows, own, rank)


@pytest.mark.parametrize("rows", [12, 40])
def test_an_adapter_that_is_not_a_number_leaves_rows_of_others_alone(rows: int) -> None:
    product = Product(rows, [1, 2, 0], 16, WHOLE, 2048)
    normed = norm_of(draw(rows, 2048), draw(2048), parts=1)
    expected = gemm.normed_linear(normed, EPS, product.weight, update=product.begin(normed.x))
    product.spoil(0)
    found = gemm.normed_linear(normed, EPS, product.weight, update=product.begin(normed.x))
    others = torch.arange(rows) % 3 > 0
    assert torch.equal(found[others], expected[others]) and found[~others].isnan().all()


def alternate(batch: Batch, turn: int, rows: int) -> None:
    """Give a step's rows other tokens and other adapters."""
    draw_ids = torch.Generator().manual_seed(turn)
    batch.input_ids[:rows] = torch.randint(1000, (rows,), generator=draw_ids, dtype=torch.int32).cuda()
    own = (torch.arange(rows) * (1 + turn) + turn) % (NUM_ADAPTERS + 1)
    batch.params[batch.row_slots[:rows].long(), Param.ADAPTER] = own.int().cuda()


def launch_alone(*args: object, **options: object) -> None:
    """Launch a kernel, and wait in front of it and behind it."""
    launch(*args, **{**options, "pdl": False})  # pyright: ignore[reportArgumentType]
    torch.cuda.synchronize()


@pytest.mark.parametrize("rows", [1, 8, 20, 33, 64])
def test_a_replayed_step_gives_the_bits_of_one_that_waits_between_kernels(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inputs change from one replay to the next: what a kernel reads too early is that of others."""
    torch.manual_seed(3)
    decoder, size = make_decoder(qk_norm=True, bias=True), Bucket(rows, rows, decoding=True, adapters=True)
    host_batch, num_blocks = make_batch([7 * row % 400 + 1 for row in range(rows)], 512)
    host_batch.block_tables.clamp_(max=num_blocks - 1)
    for row in range(rows):
        set_params(host_batch, int(host_batch.row_slots[row]), {})
    batch, start = on_gpu(host_batch), fill_cache(decoder.allocate_kv_cache(num_blocks, 16))
    runner, cache = Runner(decoder), clone_cache(start)
    runner.find_updates = hold_adapters(decoder).find
    expected = list[Tensor]()
    with monkeypatch.context() as alone:
        for module in ("gemm.decode", "gemm.gemm_kernel", "attention.decode", "lora.fused"):
            alone.setattr(f"blink.kernels.gpu.{module}.launch", launch_alone)
        for turn in range(3):
            alternate(batch, turn, rows)
            expected.append(runner.compute_logits(batch, cache, size).clone())
    assert not torch.equal(expected[0], expected[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = runner.compute_logits(batch, cache, size)
    for turn in range(150):
        alternate(batch, turn % 3, rows)
        with torch.inference_mode():
            found.zero_()
        graph.replay()
        assert torch.equal(found, expected[turn % 3]), turn


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[LoRARequest | None]]]:
    """Write a model whose steps of few rows have updates in GEMMs, and eight adapters."""
    folder = tmp_path_factory.mktemp("fused")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
    others = {"vocab_size": 512, "initializer_range": 0.1, "tie_word_embeddings": False}
    model = save_model("qwen3", folder / "base", **sizes, **others)
    loras: list[LoRARequest | None] = [None]
    for seed in range(8):
        path = write_adapter(folder / f"{seed}", find_targets(model), seed=seed, rank=2 << seed % 4, size=0.1)
        loras.append(LoRARequest(f"adapter-{seed}", seed + 1, str(path)))
    yield folder / "base", loras


PROMPTS = [[5] * 20 + [index + 30] * 3 for index in range(9)]
LENGTH = 16


def generate(llm: LLM, prompts: list[list[int]], loras: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    return [output.outputs[0].token_ids for output in outputs]


def list_gaps(llm: LLM, prompts: list[list[int]], tokens: list[list[int]], loras: Any) -> list[float]:
    """Return by how much the logprob of each sequence's tokens is below that of the likeliest, at most."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    texts = [prompt + own for prompt, own in zip(prompts, tokens, strict=True)]
    outputs = llm.generate(texts, params, use_tqdm=False, lora_request=loras)
    gaps = list[float]()
    for output in outputs:
        own = zip(output.prompt_token_ids[-LENGTH:], (output.prompt_logprobs or [])[-LENGTH:], strict=True)
        likeliest = [
            (max(one.logprob for one in place.values()), place[token].logprob) for token, place in own if place
        ]
        assert len(likeliest) == LENGTH
        gaps.append(max(most - found for most, found in likeliest))
    return gaps


def test_eight_adapters_and_none_give_their_own_tokens_in_one_batch_and_alone(
    served: tuple[Path, list[LoRARequest | None]],
) -> None:
    """Each token is the likeliest in float32 but for what bfloat16 rounds, and far from that with another adapter."""
    path, loras = served
    sites = expected_sites(read_spec(path), 16)
    for rows in (1, 9):
        bucket = Bucket(rows, rows, decoding=True, adapters=True)
        assert plan_step(GpuDevice(), sites, bucket).norms is NormStyle.UPDATED
    with open_llm(path, enable_lora=True, max_loras=8, dtype="bfloat16") as llm:
        together = generate(llm, PROMPTS, loras)
        alone = [generate(llm, [prompt], lora)[0] for prompt, lora in zip(PROMPTS, loras, strict=True)]
    with open_llm(path, enable_lora=True, max_loras=8, device="cpu") as llm:
        for tokens in (together, alone):
            gaps = list_gaps(llm, PROMPTS, tokens, loras)
            assert max(gaps) < 0.3, gaps
            others = list_gaps(llm, PROMPTS, tokens, [*loras[1:], loras[0]])
            assert min(others) > 1.0, others
