# SPDX-License-Identifier: Apache-2.0
"""Steps of decoding rows in segments: the same bits as whole ones, with another step between any two of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import test_decode_kernels
import test_decode_moe

from blink.kernels.batch import Batch, Param
from blink.kernels.gpu.device import has_clusters
from blink.models.decoder import Decoder
from blink.plan.execution_plan import NormStyle
from blink.plan.site import Bucket
from blink.runner.run import Runner
from blink.runner.stream import Stream
from model_driver import set_params
from model_specs import clone_cache, fill_cache, stack_cache
from step_plans import plan_of

pytestmark = pytest.mark.skipif(not has_clusters(), reason="needs a GPU with programmatic launches")

Run = Callable[[], None]
MODELS: dict[str, Callable[[], Decoder]] = {
    "dense": functools.partial(test_decode_kernels.make_decoder, qk_norm=True, bias=True),
    "experts": test_decode_moe.make_decoder,
}


def make_batch(lengths: list[int]) -> tuple[Batch, int]:
    """Return a batch of such contexts on the GPU, whose rows ask for logprobs, and the number of its blocks."""
    batch, num_blocks = test_decode_kernels.make_batch(lengths, 512)
    batch.input_ids.random_(1000)
    batch.block_tables.clamp_(max=num_blocks - 1)
    for slot in range(len(lengths) + 1):
        set_params(batch, slot, {Param.NUM_LOGPROBS: 5})
    return test_decode_kernels.on_gpu(batch), num_blocks


class Step:
    """A step's batch and KV cache, of which each run begins with the same contents."""

    def __init__(self, decoder: Decoder, lengths: list[int], seed: int) -> None:
        self.decoder, self.runner, self.rows = decoder, Runner(decoder), len(lengths)
        self.active = sum(length > 0 for length in lengths)
        self.batch, num_blocks = make_batch(lengths)
        self.cache = decoder.allocate_kv_cache(num_blocks, 16)
        generator = torch.Generator("cuda").manual_seed(seed)
        self._before = clone_cache(fill_cache(self.cache, generator))
        self.reset()

    def reset(self) -> None:
        for layer, before in zip(self.cache, self._before, strict=True):
            layer.cells.copy_(before.cells)
        for part in (self.batch.sampled_tokens, self.batch.sampled_logprobs, self.batch.top_logprobs):
            part.fill_(-7)

    def run_whole(self) -> None:
        self.runner.forward(self.batch, self.cache, Bucket(self.rows, self.rows, decoding=True))

    def make_segments(self, left: list[Stream | None]) -> list[Run]:
        """Return what runs each layer, and puts what it leaves behind what others have left."""
        residual = torch.empty(0, device="cuda")  # only the general kernels keep anything there

        def run(layer: int) -> None:
            size, layers = Bucket(self.rows, self.rows, decoding=True), range(layer, layer + 1)
            before = left[-1] if layer else None
            left.append(self.runner.forward_segment(self.batch, self.cache, size, layers, residual, before))

        return [functools.partial(run, layer) for layer in range(self.decoder.spec.num_layers)]

    def results(self) -> list[torch.Tensor]:
        batch = self.batch
        found = (batch.sampled_tokens, batch.sampled_logprobs, batch.top_logprobs[:, :5])
        return [stack_cache(self.cache), *(part[: self.active].clone() for part in found)]


def capture(run: Run, pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph


@pytest.mark.parametrize("lengths", [[17], [300, 41], [5, 300, 16, 41, 0], [*range(1, 400, 9), 0, 0]], ids=len)
@pytest.mark.parametrize("model", MODELS)
def test_segments_with_another_step_between_them_give_the_bits_of_whole_steps(model: str, lengths: list[int]) -> None:
    torch.manual_seed(12)
    decoder = MODELS[model]()
    assert plan_of(decoder, len(lengths)).norms is not NormStyle.KERNEL
    step, other = Step(decoder, lengths, 1), Step(decoder, [33, 7, 90], 2)
    expected = []
    for each in (step, other):
        each.run_whole()
        expected.append(each.results())
        each.reset()
    for run in step.make_segments([]):
        run()  # compiles
    torch.cuda.synchronize()
    # As the engine does: what is captured later may be given memory that an earlier graph of the pool writes.
    pool, apart, left = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle(), list[Stream | None]()
    between = capture(other.run_whole, pool)
    segments = [capture(run, apart) for run in step.make_segments(left)]
    step.reset()
    for segment in segments:
        other.reset()
        segment.replay()
        between.replay()
    torch.cuda.synchronize()
    for each, wanted in zip((step, other), expected, strict=True):
        for found, right in zip(each.results(), wanted, strict=True):
            assert torch.equal(found, right)
