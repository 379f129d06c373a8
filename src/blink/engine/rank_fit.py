# SPDX-License-Identifier: Apache-2.0
"""What a model takes of each GPU of a tensor-parallel group, and the smallest group that it fits. Loads no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from blink.config import FITTING_RANKS, EngineConfig, parse_object
from blink.engine.cache_size import CacheShape
from blink.engine.geometry import count_slots, fit_sequences, spare_snapshots
from blink.errors import ConfigError
from blink.formats.schemes import FP8_ROWS
from blink.models.spec import ModelSpec
from blink.models.weight_bytes import count_weights
from blink.models.weights.files import resolve_model
from blink.models.weights.source import read_spec

logger = logging.getLogger("blink.engine")

SIZES = (1, 2, 4, 8)
DEFAULT_STEP_TOKENS = 2048
GRAPH_BYTES = 1 << 30  # executables of all graphs, and the workspaces that capture adds


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """What one of `size` ranks takes of its GPU."""

    size: int
    weight_bytes: int
    num_blocks: int  # of the KV cache, in what is left; 0: not even the weights fit
    longest_blocks: int  # that one sequence of the longest context takes

    @property
    def fits(self) -> bool:
        """Whether a sequence of the longest context fits."""
        return self.num_blocks >= self.longest_blocks


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """What an engine has of each GPU, and what it keeps there."""

    num_bytes: int  # beside the graphs
    block_size: int
    itemsize: int  # bytes of a number of the KV cache
    step_tokens: int
    max_num_seqs: int


def measure_model(config: EngineConfig, room: int, num_gpus: int) -> Iterator[RankNeeds]:
    """Yield what the configured model takes, by the number of ranks up to that of GPUs; room: bytes of the smallest.

    Raises:
        ConfigError: there is no such model.
    """
    path = resolve_model(config.model.model)
    spec = read_spec(path, parse_object("hf_overrides", config.model.hf_overrides))
    if config.model.quantization == "fp8" and spec.quantization is None:
        spec = replace(spec, quantization=replace(FP8_ROWS, output=FP8_ROWS))
    if config.model.max_model_len > 0:
        spec = spec.limit(min(config.model.max_model_len, spec.max_model_len))
    spec = replace(spec, rollback=config.speculation.num_tokens)
    size = 4 if config.model.dtype == "float32" else 2
    cached = size if config.model.kv_cache_dtype == "auto" else 1
    tokens = config.max_num_batched_tokens or DEFAULT_STEP_TOKENS
    of_gpu = GpuRoom(room - GRAPH_BYTES, config.block_size, cached, tokens, config.max_num_seqs)
    sizes = [one for one in SIZES if one <= num_gpus]
    return list_needs(spec, lambda part: count_weights(part, size, stays_quantized=size == 2).total, of_gpu, sizes)


def list_needs(
    spec: ModelSpec, count: Callable[[ModelSpec], int], room: GpuRoom, sizes: Iterable[int] = SIZES
) -> Iterator[RankNeeds]:
    """Yield what each size takes that divides the model; count: the bytes of a rank's weights."""
    for size in sizes:
        try:
            part = take_first(spec, size)
        except ConfigError:
            continue
        yield _fit(part, size, count(part), room)


def _fit(part: ModelSpec, size: int, weight_bytes: int, room: GpuRoom) -> RankNeeds:
    shape = CacheShape(
        layout=part.cache_layout,
        block_size=room.block_size,
        itemsize=room.itemsize,
        max_model_len=part.max_model_len,
        step_tokens=room.step_tokens,
    )
    left, states = room.num_bytes - weight_bytes, part.cache_layout.bytes_per_sequence(room.itemsize)
    slots = count_slots(fit_sequences(room.max_num_seqs, max(left, 0), states))
    left = spare_snapshots(left - slots * states, states)
    blocks = shape.divide(left).num_blocks if left >= shape.least_bytes else 0
    return RankNeeds(size, weight_bytes, blocks, shape.max_blocks)


def take_first(spec: ModelSpec, size: int) -> ModelSpec:
    """Return what the first of so many ranks has of a model; all of it where there is one, or as few as it fits.

    Raises:
        ConfigError: the size does not divide the model.
    """
    return spec if size in (1, FITTING_RANKS) else spec.split(size, spec.scaled_columns)[0]


def take_configured(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Return what the first of the configured ranks has of a model.

    Raises:
        ConfigError: their number does not divide the model.
    """
    return take_first(spec, config.tensor_parallel_size)


def describe_part(part: ModelSpec) -> str:
    """Say what one of several ranks has."""
    text, mixture = f"one of {part.shard.size} ranks", part.mixture
    if mixture is None:
        return text
    has = (
        f"{mixture.held} whole experts of {mixture.experts}" if mixture.held else f"parts of {mixture.experts} experts"
    )
    return f"{text}, with {has}"


def settle_ranks(config: EngineConfig, measure_gpus: Callable[[], list[int]]) -> EngineConfig:
    """Return a configuration with a number of ranks, where it asks for as few as the model fits on: on a CPU for one.

    measure_gpus: returns the memory of each GPU, in bytes.

    Raises:
        ConfigError: the model does not fit on all GPUs together.
    """
    if config.tensor_parallel_size != FITTING_RANKS:
        return config
    size, memory = 1, [] if config.device == "cpu" else measure_gpus()
    if memory:
        room = int(min(memory) * config.gpu_memory_utilization)
        size = choose_size(measure_model(config, room, len(memory)))
        logger.info("--tensor-parallel-size auto: %d of %d GPUs", size, len(memory))
    return replace(config, tensor_parallel_size=size)


def choose_size(needs: Iterable[RankNeeds]) -> int:
    """Return the smallest size that a model fits on.

    Raises:
        ConfigError: it fits on none of these.
    """
    tried = list(needs)
    for one in tried:
        if one.fits:
            return one.size
    least = tried[-1] if tried else RankNeeds(1, 0, 0, 0)
    raise ConfigError(
        f"--tensor-parallel-size auto: the model does not fit {least.size} of these GPUs, which then each have "
        f"{least.weight_bytes / 2**30:.1f} GiB of weights: use more or larger GPUs, a smaller model or "
        "--quantization fp8, or lower --max-model-len"
    )
