# SPDX-License-Identifier: Apache-2.0
"""Few decoding rows with experts in FP8 blocks and in 4 bits, which their kernels read as the grouped GEMMs do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from blink.formats.experts import experts_of
from blink.formats.schemes import FormatId
from blink.kernels.cpu import moe as cpu_moe
from blink.kernels.gpu.device import has_clusters
from blink.runner.gpu_device import MAX_STREAMED_PACKED_ROWS, STREAMED
from model_driver import compute_decoded_logits, load_decoder
from quantized_checkpoints import write_checkpoints

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_decode_kernels import EPS, draw, normed
from test_decode_moe import Chain, check_replays
from test_packed_experts import assert_packed, draw_experts, row_error

from blink.kernels.gpu.moe import decode as moe
from step_plans import plan_of

pytestmark = pytest.mark.skipif(not has_clusters(), reason="needs a GPU with programmatic launches")

FORMS = [FormatId.FP8, FormatId.INT4]


class Mixture:
    """One layer's experts, and rows to run them on; what no row chose holds what is no number."""

    def __init__(self, form: FormatId, rows: int, shape: tuple[int, int, int, int]) -> None:
        torch.manual_seed(11)
        count, self.top_k, hidden, size = shape
        self.residual, self.norm, self.next_norm = draw(rows, hidden), draw(hidden), draw(hidden)
        self.logits = draw(rows, count)
        self.context_lens = torch.ones(rows, dtype=torch.int32, device="cuda")
        self.gate_up = draw_experts(form, count, 2 * size, hidden)
        self.down = draw_experts(form, count, hidden, size, scale=8)  # outweighs the residual's rounding
        weights = [part.dequantize(torch.float32) for part in (self.gate_up, self.down)]
        x = normed(self.residual, self.norm)
        self.added = cpu_moe.moe(x, self.logits.float(), *weights, top_k=self.top_k, renormalize=True)
        chosen = self.logits.topk(self.top_k).indices.unique().tolist()
        unused = [expert for expert in range(count) if expert not in chosen]
        self.gate_up.groups[unused] = self.down.groups[unused] = -1

    def run(self) -> Tensor:
        residual = self.residual.clone()
        routes = moe.Routes(self.logits, self.context_lens, self.top_k, True)
        gated = moe.gate_experts(residual, self.norm, EPS, self.gate_up, routes)
        following = moe.down_normed_experts(gated, self.down, routes, residual, self.next_norm)
        assert torch.equal(following.x.nan_to_num(), (residual * self.next_norm).nan_to_num())
        return residual

    def check(self) -> None:
        found = self.run()
        assert float((found.float() - self.residual.float() - self.added).norm() / self.added.norm()) < 1e-2
        assert torch.equal(self.run(), found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "shape", [(128, 8, 256, 128), (64, 6, 2048, 768), (32, 3, 640, 384), (32, 32, 384, 512)], ids=str
)
def test_experts_equal_the_dequantised(form: FormatId, rows: int, shape: tuple[int, int, int, int]) -> None:
    mixture = Mixture(form, rows, shape)
    assert moe.refuses(experts_of(mixture.gate_up, mixture.down, mixture.top_k), rows) is None
    mixture.check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("gate", "down"),
    [
        (moe.MoeGateConfig(4, 4, 2, 1), moe.MoeDownConfig(2, 8, 2)),
        (moe.MoeGateConfig(2, 16, 3, 2), moe.MoeDownConfig(2, 32, 3)),
        (moe.MoeGateConfig(1, 8, 4, 3), moe.MoeDownConfig(1, 16, 8)),
    ],
    ids=str,
)
def test_any_split_gives_the_same_sums(
    form: FormatId, rows: int, gate: moe.MoeGateConfig, down: moe.MoeDownConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "choose_gate_config", lambda *_: gate)
    monkeypatch.setattr(moe, "choose_down_config", lambda *_: down)
    Mixture(form, rows, (64, 6, 512, 256)).check()


@pytest.mark.parametrize("form", FORMS)
def test_padding_and_rows_of_nan_spoil_no_other_row(form: FormatId) -> None:
    mixture = Mixture(form, 4, (64, 6, 512, 256))
    expected = mixture.run()
    mixture.context_lens[1], mixture.residual[1], mixture.residual[2] = 0, 7, torch.nan
    found = mixture.run()
    assert torch.equal(found[[0, 3]], expected[[0, 3]])
    assert torch.equal(found[1], mixture.residual[1]) and found[2].isnan().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_replayed_chain_gives_the_bits_of_one_that_waits_between_kernels(
    form: FormatId, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(rows)
    monkeypatch.setattr(chain.mixture, "gate_up", draw_experts(form, 128, 512, 1024))
    monkeypatch.setattr(chain.mixture, "down", draw_experts(form, 128, 1024, 256))
    check_replays(chain, monkeypatch)


@pytest.mark.parametrize("scheme", ["fp8-block", "awq"])
def test_steps_of_few_rows_have_no_grouped_products(tmp_path: Path, scheme: str) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
    path, plain = write_checkpoints(tmp_path, scheme, **experts)
    exact, found = load_decoder(plain, "cpu", torch.float32), load_decoder(path, "cuda", torch.bfloat16)
    assert_packed(found)
    for rows in range(1, MAX_STREAMED_PACKED_ROWS + 1):
        layers = plan_of(found, rows).layers
        assert all(layer.experts and layer.experts.kernel == STREAMED for layer in layers)
        assert row_error(compute_decoded_logits(found, rows), compute_decoded_logits(exact, rows)) < 5e-2
