# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of its configuration, by the names that scripts for vLLM read."""

from __future__ import annotations

from dataclasses import dataclass

from blink.link.client import RegionInfo
from blink.offline.local_engine import LocalEngine
from blink.offline.public_tokenizer import PublicTokenizer


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model, as vLLM's ModelConfig tells of it."""

    model: str
    tokenizer: str
    served_model_name: str
    max_model_len: int
    vocab_size: int
    dtype: str
    quantization: str | None
    seed: int

    def get_vocab_size(self) -> int:
        """Return the number of tokens that the model may generate."""
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class CacheDescription:
    """The KV cache, as vLLM's CacheConfig tells of it."""

    block_size: int
    num_gpu_blocks: int | None
    enable_prefix_caching: bool
    cache_dtype: str
    gpu_memory_utilization: float


@dataclass(frozen=True, slots=True)
class SchedulerDescription:
    """The scheduler, as vLLM's SchedulerConfig tells of it."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """An engine, as vLLM's LLMEngine and VllmConfig tell of it."""

    model_config: ModelDescription
    cache_config: CacheDescription
    scheduler_config: SchedulerDescription
    tokenizer: PublicTokenizer

    @property
    def vllm_config(self) -> EngineDescription:
        """Return this description, which holds all parts."""
        return self

    def get_model_config(self) -> ModelDescription:
        """Return what the model is."""
        return self.model_config

    def get_tokenizer(self) -> PublicTokenizer:
        """Return the model's tokenizer."""
        return self.tokenizer


def describe(engine: LocalEngine, info: RegionInfo) -> EngineDescription:
    """Return what an engine is that has told its sizes."""
    config, model = engine.config.engine, engine.config.engine.model
    blocks = engine.client.stats().get("num_blocks")
    return EngineDescription(
        ModelDescription(
            model=engine.assets.root,
            tokenizer=model.tokenizer or engine.assets.root,
            served_model_name=info.model,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            dtype=model.dtype,
            quantization=None if model.quantization == "auto" else model.quantization,
            seed=model.seed,
        ),
        CacheDescription(
            block_size=info.block_size,
            num_gpu_blocks=blocks,
            enable_prefix_caching=info.prefix_caching,
            cache_dtype=model.kv_cache_dtype,
            gpu_memory_utilization=config.gpu_memory_utilization,
        ),
        SchedulerDescription(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            policy=info.scheduling_policy,
        ),
        engine.tokenizer,
    )
