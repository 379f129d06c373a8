# SPDX-License-Identifier: Apache-2.0
"""Steps by the kernels of decoding in one order: the general kernels' logits, and one result however a text is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blink.kernels.gpu.device import has_warpgroups
from blink.models.decoder import Decoder
from blink.plan.execution_plan import NormStyle
from blink.plan.site import Bucket
from blink.runner.run import Runner
from blink.runner.stream import Stream
from model_driver import Driver
from model_specs import fill_cache, stack_cache

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from test_decode_kernels import error, make_decoder

from blink.kernels.gpu.launch import launch

pytestmark = pytest.mark.skipif(not has_warpgroups(), reason="needs Hopper's warpgroup MMAs")

PROMPTS = [(1, 40), (150, 0), (1, 17), (5, 0)]  # tokens of a step, and those before
TEXT = 100


@pytest.fixture(params=["biases", "norms"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    torch.manual_seed(10)
    return make_decoder(qk_norm=request.param == "norms", bias=request.param == "biases")


def make_driver(decoder: Decoder, prompts: list[tuple[int, int]], *, deterministic: bool = True) -> Driver:
    driver = Driver(decoder)
    driver.runner = Runner(decoder, deterministic=deterministic)
    for tokens, before in prompts:
        driver.add([token * 7 % 1000 for token in range(before + tokens)], 1)
    fill_cache(driver.kv_cache, torch.Generator("cuda").manual_seed(3))
    for sequence, (_, before) in zip(driver.sequences, prompts, strict=True):
        sequence.num_computed = before
    return driver


def same_bits(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def styles_of(driver: Driver) -> set[NormStyle]:
    return {plan.norms for plan in vars(driver.runner)["_plans"].values()}


def test_a_step_gives_the_logits_and_the_cache_of_the_general_one(decoder: Decoder) -> None:
    drivers = [make_driver(decoder, PROMPTS, deterministic=flag) for flag in (True, False)]
    found, expected = (driver.compute_logits() for driver in drivers)
    assert [styles_of(driver) for driver in drivers] == [{NormStyle.ORDERED}, {NormStyle.KERNEL}]
    assert torch.isfinite(found).all() and error(found, expected) < 3e-2
    assert error(*(stack_cache(driver.kv_cache) for driver in drivers)) < 1e-2


def test_the_last_token_of_a_text_has_the_same_logits_however_the_text_is_cut(decoder: Decoder) -> None:
    expected = make_driver(decoder, [(TEXT, 0)]).compute_logits()
    for cuts in ([99], [16, 32, 99], [1, 50], [96, 97, 98, 99]):
        driver = make_driver(decoder, [(TEXT, 0)])
        [sequence] = driver.sequences
        for end in cuts:
            count = end - sequence.num_computed
            size = Bucket(driver._compose([(sequence, count)]), 1)
            driver.runner.forward(driver.batch, driver.kv_cache, size)
            sequence.num_computed = end
        tokens = driver._compose([(sequence, TEXT - sequence.num_computed)])
        size = Bucket(tokens, 1, decoding=tokens == 1)
        same_bits(driver.runner.compute_logits(driver.batch, driver.kv_cache, size), expected)


def test_every_token_has_the_same_hidden_state_in_any_step(decoder: Decoder) -> None:
    whole = make_driver(decoder, [(TEXT, 0)])
    tokens = whole._compose([(whole.sequences[0], TEXT)])
    expected = whole.runner.compute_hidden(whole.batch, whole.kv_cache, tokens, 1)
    mixed = make_driver(decoder, [(TEXT, 0), (60, 0), (1, 30)])
    first, *others = mixed.sequences
    rows = [(others[1], 1), (first, 70), (others[0], 60)]
    mixed.runner.compute_hidden(mixed.batch, mixed.kv_cache, mixed._compose(rows), 3)
    first.num_computed = 70
    tokens = mixed._compose([(first, TEXT - 70)])
    same_bits(mixed.runner.compute_hidden(mixed.batch, mixed.kv_cache, tokens, 1), expected[70:])


@pytest.mark.parametrize("decoding", [True, False])
def test_a_replayed_step_gives_the_bits_of_one_that_waits_between_kernels(
    decoder: Decoder, decoding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(decoder, [(1, 40), (1, 300), (1, 17)] if decoding else PROMPTS)
    rows = driver._choose_rows(1024)
    size = Bucket(driver._compose(rows), len(rows), decoding=decoding)
    with monkeypatch.context() as patch:

        def launch_alone(*args: Any, **options: Any) -> None:
            launch(*args, **{**options, "pdl": False})
            torch.cuda.synchronize()

        for module in ("gemm.gemm_kernel", "gemm.decode", "attention.decode"):
            patch.setattr(f"blink.kernels.gpu.{module}.launch", launch_alone)
        expected = driver.runner.compute_logits(driver.batch, driver.kv_cache, size).clone()
    driver.runner.compute_logits(driver.batch, driver.kv_cache, size)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = driver.runner.compute_logits(driver.batch, driver.kv_cache, size)
    for _ in range(50):
        with torch.inference_mode():
            found.zero_()
        graph.replay()
        same_bits(found, expected)


def test_segments_with_another_step_between_them_give_the_bits_of_whole_steps(decoder: Decoder) -> None:
    whole, cut = (make_driver(decoder, PROMPTS) for _ in range(2))
    other = make_driver(decoder, [(90, 0), (1, 50)])
    rows = whole._choose_rows(1024)
    size = Bucket(whole._compose(rows), len(rows))
    whole.runner.forward(whole.batch, whole.kv_cache, size)
    cut._compose(cut._choose_rows(1024))
    before: Stream | None = None
    residual = torch.empty(0, device="cuda")  # only the general kernels keep anything there
    for layer in range(decoder.spec.num_layers):
        layers = range(layer, layer + 1)
        before = cut.runner.forward_segment(cut.batch, cut.kv_cache, size, layers, residual, before)
        other.compute_logits()
    same_bits(stack_cache(cut.kv_cache), stack_cache(whole.kv_cache))
    assert torch.equal(cut.batch.sampled_tokens[: len(rows)], whole.batch.sampled_tokens[: len(rows)])
