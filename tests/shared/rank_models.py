# SPDX-License-Identifier: Apache-2.0
"""Models that several ranks share, and what one rank computes that adds in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blink.config import ModelConfig
from blink.engine.ranks import Followers, RankMemory
from blink.formats.base import QuantizedWeight, Weight, matrix_of
from blink.kernels.batch import Batch, Param
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder
from blink.models.layer_weights import LatentWeights, LayerWeights, RecurrentWeights
from blink.models.weights.loader import load_model, open_model
from blink.plan.site import Bucket
from blink.runner.cpu_device import CpuDevice
from blink.runner.devices import code_of
from blink.runner.norm_kernels import NormKernels
from blink.runner.planner import choose_matmul
from model_driver import Driver

CPU = torch.device("cpu")


def load_parts(path: Path, size: int, **options: Any) -> list[Decoder]:
    """Load the parts of all ranks."""
    source = open_model(ModelConfig(model=str(path), **options), CPU, torch.float32)
    load = source.split(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(load, range(size)))


def multiply(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias by the CPU's kernel for the weight."""
    choice = choose_matmul(CpuDevice(), matrix_of(weight), len(x))
    return code_of(CPU).kernels.matmuls[choice.kernel].multiply(x, weight, bias)


class _Parted(QuantizedWeight):
    """The parts of a weight."""

    def __init__(self, shape: tuple[int, int], parts: Sequence[Weight]) -> None:
        self.shape, self.dtype, self.device, self._parts = shape, torch.float32, CPU, parts

    @property
    def nbytes(self) -> int:
        return 4 * self.shape[0] * self.shape[1]

    def dequantize(self) -> Tensor:
        raise NotImplementedError


class JoinedRows(_Parted):
    """Parts by rows: each is multiplied by itself."""

    def __init__(self, whole: Weight, parts: Sequence[Weight]) -> None:
        super().__init__((whole.shape[0], whole.shape[1]), parts)
        rows = dense(whole)
        self._places = [(rows[:, None] == dense(part)[None]).all(-1).float().argmax(0) for part in parts]
        assert torch.cat(self._places).unique().numel() == self.shape[0]

    def multiply(self, x: Tensor) -> Tensor:
        result = torch.full((len(x), self.shape[0]), torch.nan)
        for part, places in zip(self._parts, self._places, strict=True):
            result[:, places] = multiply(x, part)
        return result


class SummedColumns(_Parted):
    """Parts by columns: their products are added in the order of ranks, the first rank's with the bias."""

    def __init__(self, parts: Sequence[LayerWeights]) -> None:
        weights = [part.output for part in parts]
        super().__init__((weights[0].shape[0], sum(weight.shape[1] for weight in weights)), weights)
        self._biases = [part.output_bias for part in parts]

    def multiply(self, x: Tensor) -> Tensor:
        columns = x.split([part.shape[1] for part in self._parts], dim=1)
        return add_up(
            multiply(each.contiguous(), part, bias)
            for each, part, bias in zip(columns, self._parts, self._biases, strict=True)
        )


def _join_gates(whole: LayerWeights, parts: Sequence[LayerWeights]) -> RecurrentWeights | None:
    if whole.recurrent is None:
        return None
    gates = [part.recurrent.gates for part in parts if part.recurrent is not None]
    return replace(whole.recurrent, gates=JoinedRows(whole.recurrent.gates, gates))


def _join_queries(whole: LayerWeights, parts: Sequence[LayerWeights]) -> LatentWeights | None:
    if whole.latent is None or whole.latent.query is None:
        return whole.latent
    queries = [part.latent.query for part in parts if part.latent is not None and part.latent.query is not None]
    return replace(whole.latent, query=JoinedRows(whole.latent.query, queries))


def dense(weight: Weight) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight.to_dense() if weight.is_mkldnn else weight


def add_up(values: Any) -> Tensor:
    first, *others = values
    for each in others:
        first = first + each
    return first


def make_oracle(whole: Decoder, parts: Sequence[Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a whole model add in the order of ranks, with the ranks' weights in place of its own."""
    mlps: dict[int, list[Any]] = {}
    for index, layer in enumerate(whole.layers):
        own = [part.layers[index] for part in parts]
        mlps[id(layer.mlp)] = [each.mlp for each in own]
        beside = getattr(layer.mlp, "beside", None)
        if beside is not None:
            mlps[id(beside.mlp)] = [each.mlp.beside.mlp for each in own]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        whole.layers[index] = replace(
            layer,
            qkv=JoinedRows(layer.qkv, [each.qkv for each in own]),
            output=SummedColumns(own),
            output_bias=None,
            recurrent=_join_gates(layer, own),
            latent=_join_queries(layer, own),
        )
    whole.lm_head = JoinedRows(whole.lm_head, [part.lm_head for part in parts])

    def by_parts(method: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
        """Call a method once with each part of the MLP that is one of its arguments."""

        def call(*args: Any) -> Tensor:
            found = mlps.get(id(args[place]))
            if found is None:
                return method(*args)
            return add_up([method(*args[:place], each, *args[place + 1 :]) for each in found])

        return call

    def multiply_any(_self: NormKernels, x: Tensor, weight: Weight, bias: Tensor | None, _choice: Any) -> Tensor:
        return multiply(x, weight, bias)  # by the part's own kernel, which may not be that of the whole

    monkeypatch.setattr(NormKernels, "_run_dense", by_parts(NormKernels._run_dense, 2))
    monkeypatch.setattr(NormKernels, "_run_experts", by_parts(NormKernels._run_experts, 2))
    monkeypatch.setattr(NormKernels, "_mix", by_parts(NormKernels._mix, 3))
    monkeypatch.setattr(NormKernels, "_multiply", multiply_any)


class RankRunner:
    """What a Driver takes for a Runner: all ranks of a model."""

    def __init__(self, followers: Followers) -> None:
        self.followers = followers

    def forward(self, batch: Batch, kv_cache: KvCache, size: Bucket) -> None:
        self.followers.run_step(size, lambda: self.followers.runner.forward(batch, kv_cache, size), scoring=False)


def drive_ranks(
    path: Path, size: int, timeout: float = 30.0, runner: type[RankRunner] = RankRunner
) -> tuple[Driver, Followers]:
    """Return a driver of a model that several ranks share, and the ranks, which are to be ended."""
    source = open_model(ModelConfig(model=str(path)), CPU, torch.float32)
    followers = Followers(size, source.split(size), timeout)
    driver = Driver(followers.runner.model)
    driver.runner = runner(followers)  # pyright: ignore[reportAttributeAccessIssue]

    def allocate(model: Decoder) -> RankMemory:
        own = driver.kv_cache.first
        cache = model.allocate_kv_cache(own.num_blocks, own.block_size, 8)
        return RankMemory(driver.batch, driver.batch, cache, torch.full((4096, model.spec.hidden_size), torch.nan))

    followers.allocate(allocate)
    return driver, followers


def run_to_end(driver: Driver, prompts: Sequence[list[int]], num_new: int = 5) -> list[tuple[list[int], Tensor]]:
    """Continue prompts greedily; return what each step sampled: its tokens, and their logprobs."""
    for prompt in prompts:
        driver.add(prompt, num_new, {Param.NUM_LOGPROBS: 0})
    steps: list[tuple[list[int], Tensor]] = []
    while driver.step(max_chunk=24):
        rows = int(driver.batch.header[0])
        steps.append((driver.batch.sampled_tokens.tolist()[:rows], driver.batch.sampled_logprobs[:rows].clone()))
    return steps


def run_oracle(path: Path, size: int, prompts: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what one rank samples that adds in the order of `size` ranks."""
    with monkeypatch.context() as patch:
        whole = load_model(ModelConfig(model=str(path)), CPU, torch.float32)
        make_oracle(whole, load_parts(path, size), patch)
        return run_to_end(Driver(whole), prompts)
