# SPDX-License-Identifier: Apache-2.0
"""`blink doctor MODEL --plan`: which kernel each layer takes in each size of step. Needs config.json alone."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any

from blink.cli.loading import load
from blink.cli.torch_probe import probe_torch
from blink.config import EngineConfig, ModelConfig, option
from blink.errors import ConfigError
from blink.host.extras import how_to_install
from blink.hub.localize import find_cached
from blink.models.spec import ModelSpec

_PACKAGES = ("torch", "triton", "cuda")


def _same(owner: type, name: str) -> Any:
    """Declare an option of another configuration once more."""
    [one] = (one for one in fields(owner) if one.name == name)
    return field(default=one.default, metadata=one.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What to say of a model, on which GPU and with which options."""

    plan: bool = option(False, "print the kernel of each layer in each size of step, and why others do not run")
    gpu: str = option("", "GPU that need not be here: h100, h200, a100 or l40s; empty: this machine's", metavar="NAME")
    quantization: str = _same(ModelConfig, "quantization")
    kv_cache_dtype: str = _same(ModelConfig, "kv_cache_dtype")
    max_num_seqs: int = _same(EngineConfig, "max_num_seqs")
    max_num_batched_tokens: int = _same(EngineConfig, "max_num_batched_tokens")
    block_size: int = _same(EngineConfig, "block_size")
    tensor_parallel_size: int = _same(EngineConfig, "tensor_parallel_size")
    speculative_config: str = _same(EngineConfig, "speculative_config")
    deterministic: bool = _same(EngineConfig, "deterministic")

    def take_part(self, spec: ModelSpec) -> ModelSpec:
        """Return what the first of the ranks has of a model; all of it where there is one, or as few as it fits.

        Raises:
            ConfigError: their number does not divide the model.
        """
        return load("blink.engine.rank_fit").take_first(spec, self.tensor_parallel_size)


def print_plan(model: str, config: PlanConfig) -> None:
    """Print the plan of a model.

    Raises:
        ConfigError: there is no such model or GPU, or a package is missing.
    """
    described = ModelConfig(
        model=find_cached(model), quantization=config.quantization, kv_cache_dtype=config.kv_cache_dtype
    )
    engine = EngineConfig(
        model=described,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
        deterministic=config.deterministic,
    )
    print(_show(engine, config.gpu), end="")


def _show(config: EngineConfig, gpu: str) -> str:
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"plans need {' and '.join(missing)}: {how_to_install('gpu')}")
    if not gpu and not probe_torch().gpus:
        raise ConfigError("this machine has no GPU; name one, such as --gpu h100")
    return load("blink.engine.plans").describe_plan(config, gpu)
