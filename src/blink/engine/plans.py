# SPDX-License-Identifier: Apache-2.0
"""The execution plan of a model that is not loaded, for all sizes of step that an engine would capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from blink.config import EngineConfig
from blink.engine.combinations import check_combinations
from blink.engine.determinism import check_deterministic, is_deterministic
from blink.engine.geometry import decode_graphs, mixed_graphs
from blink.engine.gpu import GpuEngine
from blink.engine.rank_fit import describe_part, take_configured
from blink.kernels.gpu.device import gpu_name, supposing
from blink.models.weights.files import resolve_model
from blink.models.weights.source import read_spec
from blink.plan.site import Bucket
from blink.runner.deterministic_device import DeterministicDevice
from blink.runner.gpu_device import GpuDevice
from blink.runner.planner import plan_model
from blink.runner.sites import ModelSites, expected_sites


def describe_plan(config: EngineConfig, gpu: str = "") -> str:
    """Return the plan of the configured model on a GPU of that name, or on this machine's.

    Raises:
        ConfigError: there is no such model or GPU, or two options do not go together.
    """
    check_combinations(config, "cuda")
    with supposing(gpu) if gpu else nullcontext():
        return _describe(config)


def _describe(config: EngineConfig) -> str:
    path = resolve_model(config.model.model)
    spec = take_configured(read_spec(path), config)
    sites = expected_sites(
        spec,
        config.block_size,
        fp8=config.model.quantization == "fp8",
        gguf=path.is_file(),
        kv_dtype="bfloat16" if config.model.kv_cache_dtype == "auto" else "float8_e4m3fn",
    )
    part = f", {describe_part(spec)}" if spec.shard.size > 1 else ""
    title = f"{path.name} on {gpu_name()}: {spec.num_layers} layers{part}"
    return f"{title}\n{plan_model(_find_device(config, sites), sites, list_buckets(config)).show()}"


def _find_device(config: EngineConfig, sites: ModelSites) -> GpuDevice:
    if not is_deterministic(config):
        return GpuDevice()
    check_deterministic(sites, "cuda")
    return DeterministicDevice()


def list_buckets(config: EngineConfig) -> Iterator[Bucket]:
    """Yield the sizes of step of an engine, but for those that score prompts."""
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens or GpuEngine.default_step_tokens
    yield from (Bucket(*size, decoding=True) for size in decode_graphs(rows))
    yield from (Bucket(*size, decoding=False) for size in mixed_graphs(tokens, rows))
