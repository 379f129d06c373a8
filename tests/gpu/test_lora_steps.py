# SPDX-License-Identifier: Apache-2.0
"""Decode steps with adapters by the kernels of few rows, against steps whose norms are kernels of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_decode_kernels import error, make_batch, make_decoder, on_gpu

from blink.adapters.modules import find_weights
from blink.kernels.batch import Param
from blink.kernels.gpu.device import has_clusters, has_warpgroups
from blink.kernels.gpu.lora import fused, paging
from blink.kernels.gpu.lora.memory import GpuAdapters
from blink.kernels.lora import LowRank
from blink.models.decoder import Decoder
from blink.plan.execution_plan import NormStyle
from blink.plan.site import Bucket
from blink.runner import gpu_device
from blink.runner.gpu_device import GpuDevice
from blink.runner.planner import plan_step
from blink.runner.run import Runner
from blink.runner.sites import sites_of
from model_driver import set_params
from model_specs import clone_cache, fill_cache, stack_cache

pytestmark = pytest.mark.skipif(not has_clusters(), reason="needs a GPU with programmatic launches")

NUM_ADAPTERS, RANK = 8, 12


def hold_adapters(decoder: Decoder) -> GpuAdapters:
    """Return random adapters of all matrices, each in the slot of its index."""
    like, draw = torch.empty(0, dtype=decoder.dtype, device=decoder.device), torch.Generator().manual_seed(4)
    weights = find_weights(decoder)
    adapters = GpuAdapters(weights, NUM_ADAPTERS, NUM_ADAPTERS, 16, like)
    for index in range(NUM_ADAPTERS):
        adapters.put(index, {
            key: [
                LowRank(
                    rows,
                    torch.randn(RANK, parts.shape[1], generator=draw) * 0.05,
                    torch.randn(rows.stop - rows.start, RANK, generator=draw) * 0.05,
                )
                for rows in parts.rows
            ]
            for key, parts in weights.items()
        })  # fmt: skip
        order = torch.tensor([index, index, 1, 0], dtype=torch.int32, device=decoder.device)
        paging.copy_ordered([adapters.places], order)
    return adapters


def style_of(decoder: Decoder, bucket: Bucket) -> NormStyle:
    return plan_step(GpuDevice(), sites_of(decoder, 16), bucket).norms


@pytest.mark.parametrize("lengths", [[5], [17, 300], [300, 16, 41, 0], [*range(1, 400, 17)], [*range(1, 400, 7)]])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("style", [NormStyle.WRITER, NormStyle.UPDATED])
def test_a_decode_step_gives_the_logits_and_the_cache_of_the_general_one(
    lengths: list[int], bias: bool, style: NormStyle, monkeypatch: pytest.MonkeyPatch
) -> None:
    if style is NormStyle.WRITER:
        monkeypatch.setattr(fused, "refuses", lambda *_: "a test")
    if style is NormStyle.UPDATED and not has_warpgroups():
        pytest.skip("needs the warpgroup products of Hopper")
    torch.manual_seed(9)
    decoder, rows = make_decoder(qk_norm=True, bias=bias), len(lengths)
    size = Bucket(rows, rows, decoding=True, adapters=True)
    monkeypatch.setattr(gpu_device, "MAX_MIXED_TOKENS", 0)
    assert style_of(decoder, size) is style
    assert style_of(decoder, replace(size, decoding=False)) is NormStyle.KERNEL
    host_batch, num_blocks = make_batch(lengths, 512)
    host_batch.input_ids.random_(1000)
    host_batch.block_tables.clamp_(max=num_blocks - 1)
    for row in range(rows):
        set_params(host_batch, int(host_batch.row_slots[row]), {Param.ADAPTER: row % (NUM_ADAPTERS + 1)})
    batch, cache = on_gpu(host_batch), fill_cache(decoder.allocate_kv_cache(num_blocks, 16))
    twin, plain = clone_cache(cache), clone_cache(cache)
    active, runner = sum(length > 0 for length in lengths), Runner(decoder)
    runner.find_updates = hold_adapters(decoder).find
    expected = runner.compute_logits(batch, twin, Bucket(rows, rows, adapters=True))[:active]
    found = runner.compute_logits(batch, cache, Bucket(rows, rows, decoding=True, adapters=True))[:active]
    assert error(found, expected) < 3e-2
    assert error(stack_cache(cache), stack_cache(twin)) < 1e-2
    unchanged = runner.compute_logits(batch, plain, Bucket(rows, rows, decoding=True))[:active]
    assert torch.isfinite(found).all()
    for row in range(active):  # those without an adapter are as in a step without any
        assert (error(found[row], unchanged[row]) < 3e-2) == (row % (NUM_ADAPTERS + 1) == 0)
