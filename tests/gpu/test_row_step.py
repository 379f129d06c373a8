# SPDX-License-Identifier: Apache-2.0
"""Steps of one row by one kernel beside those of a kernel for each product."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from blink.kernels.operands import HeadNorm
from blink.kernels.quantized import GROUP, QuantizedMatrix, pack, quantize_fp8
from blink.kernels.weight import Weight
from blink.models.decoder import Decoder
from blink.models.layer import DenseMlp, Layer, MoeMlp
from blink.models.rope import Rope
from blink.models.spec import ModelSpec
from model_driver import Driver

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_decode_kernels import error
from test_moe import to_fp8

from blink.kernels.gpu.decode.launch import can_launch, can_multiply_groups
from blink.models import decode_step

pytestmark = pytest.mark.skipif(not can_launch() or not can_multiply_groups(), reason="needs Hopper")


@pytest.fixture(autouse=True)
def _one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "MAX_ROW_STEP_ROWS", 1)


HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 8, 2, 128, 1000
FORMS = ["bf16", "fp8", "int4"]


def draw(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return torch.empty(shape, device="cuda").normal_(mean, std).to(torch.bfloat16)


def draw_matrix(form: str, rows: int, columns: int) -> Weight:
    matrix = draw(rows, columns, std=columns**-0.5)
    if form == "bf16":
        return matrix
    if form == "fp8":
        return pack([quantize_fp8(matrix.float())])
    groups = rows, columns // GROUP
    scales = torch.rand(groups, device="cuda").add_(0.5).mul_(columns**-0.5 / 4)
    codes = torch.randint(16, (rows, columns), dtype=torch.uint8, device="cuda")
    return pack([QuantizedMatrix(codes, scales, torch.randint(5, 11, groups, dtype=torch.uint8, device="cuda"))])


def draw_mlp(form: str, width: int, num_experts: int) -> DenseMlp | MoeMlp:
    if not num_experts:
        return DenseMlp(draw_matrix(form, 2 * width, HIDDEN), draw_matrix(form, HIDDEN, width))
    router = draw(num_experts, HIDDEN, std=HIDDEN**-0.5)
    gate_up = draw(num_experts, 2 * width, HIDDEN, std=HIDDEN**-0.5)
    down = draw(num_experts, HIDDEN, width, std=4 * width**-0.5)
    return MoeMlp(router, to_fp8(gate_up), to_fp8(down)) if form == "fp8" else MoeMlp(router, gate_up, down)


def make_decoder(form: str, *, num_experts: int = 0, head_norm: bool = False, bias: bool = False) -> Decoder:
    """Make a decoder of three layers with random weights; the output of 4 bits' stays in 16."""
    torch.manual_seed(4)
    width = 256 if num_experts else 2048
    spec = ModelSpec(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=3,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=width,
        num_experts=num_experts,
        experts_per_token=4 if num_experts else 0,
        moe_intermediate_size=256 if num_experts else 0,
        norm_topk_prob=True,
        rms_norm_eps=1e-5,
        rope=Rope(theta=1e4, rotary_dim=HEAD_DIM),
        max_model_len=1024,
    )
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    layers = [
        Layer(
            attention_norm=draw(HIDDEN, mean=1, std=0.1),
            qkv=draw_matrix(form, qkv, HIDDEN),
            qkv_bias=draw(qkv) if bias else None,
            output=draw_matrix(form, HIDDEN, HEADS * HEAD_DIM),
            output_bias=None,
            head_norm=HeadNorm(draw(HEAD_DIM, mean=1, std=0.1), draw(HEAD_DIM, mean=1, std=0.1), 1e-6)
            if head_norm
            else None,
            mlp_norm=draw(HIDDEN, mean=1, std=0.1),
            mlp=draw_mlp(form, width, num_experts),
        )
        for _ in range(spec.num_layers)
    ]
    lm_head = draw_matrix("bf16" if form == "int4" else form, VOCAB, HIDDEN)
    return Decoder(spec, draw(VOCAB, HIDDEN), layers, draw(HIDDEN, mean=1, std=0.1), lm_head)


class Row:
    """A sequence of so many tokens, of which all but the last are in the KV cache."""

    def __init__(self, decoder: Decoder, length: int) -> None:
        self.decoder, self.driver = decoder, Driver(decoder, max_len=1024)
        generator = torch.Generator().manual_seed(length)
        sequence = self.driver.add(torch.randint(VOCAB, (length,), generator=generator).tolist(), 1)
        last = sequence.tokens.pop()
        if sequence.tokens:
            tokens = self.driver._compose([(sequence, len(sequence.tokens))])
            decoder.forward(self.driver.batch, self.driver.kv_cache, tokens, 1)
            sequence.num_computed = len(sequence.tokens)
        sequence.tokens.append(last)
        self.driver._compose([(sequence, 1)])

    def compute_logits(self) -> Tensor:
        return self.decoder.compute_logits(self.driver.batch, self.driver.kv_cache, 1, 1, decoding=True)

    def compute_logits_before(self) -> Tensor:
        """Compute them by the kernels of more rows."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_step, "MAX_ROW_STEP_ROWS", 0)
            return self.compute_logits()

    @property
    def num_kernels(self) -> int:
        """Return how many steps of one kernel were made."""
        return sum(step is not None for step in self.decoder._row_steps.values())


@pytest.mark.parametrize("length", [1, 15, 16, 17, 300, 900])
@pytest.mark.parametrize("form", FORMS)
def test_logits_and_cache_are_those_of_other_kernels(form: str, length: int) -> None:
    row = Row(make_decoder(form), length)
    cache = row.driver.kv_cache
    before = cache.clone()
    expected = row.compute_logits_before()
    expected_cache = cache.clone()
    cache.copy_(before)
    found = row.compute_logits()
    assert row.num_kernels == 1
    assert error(found, expected) < 2e-2
    written = (cache != before).flatten(3).any(-1)
    assert torch.equal(written, (expected_cache != before).flatten(3).any(-1)) and int(written.sum()) == 2 * 3
    assert error(cache - before, expected_cache - before) < 2e-2


@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize("head_norm", [False, True])
def test_experts_head_norms_and_biases_are_those_of_other_kernels(form: str, *, head_norm: bool) -> None:
    for num_experts in (0, 64):
        row = Row(make_decoder(form, num_experts=num_experts, head_norm=head_norm, bias=not head_norm), 70)
        assert error(row.compute_logits(), row.compute_logits_before()) < 3e-2
        assert row.num_kernels == 1


@pytest.mark.parametrize("num_experts", [0, 64])
def test_steps_repeat_bit_for_bit(num_experts: int) -> None:
    """A word taken too early, or of another step, would show."""
    row = Row(make_decoder("bf16", num_experts=num_experts), 200)
    expected = row.compute_logits()
    assert all(torch.equal(row.compute_logits(), expected) for _ in range(300))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = row.compute_logits()
    for _ in range(300):
        graph.replay()
    assert torch.equal(found, expected)


def test_tokens_of_a_sequence_follow_those_of_other_kernels() -> None:
    """Another row's context and cache, step after step."""
    decoder = make_decoder("bf16")
    for length in (1, 31, 140):
        row = Row(decoder, length)
        assert error(row.compute_logits(), row.compute_logits_before()) < 2e-2
    assert row.num_kernels == 3


def test_what_the_kernel_does_not_read_takes_the_others() -> None:
    decoder = make_decoder("bf16")
    decoder._layers[0] = dataclasses.replace(decoder._layers[0], output_bias=draw(HIDDEN))
    row = Row(decoder, 20)
    assert torch.equal(row.compute_logits(), row.compute_logits_before())
    assert row.num_kernels == 0
