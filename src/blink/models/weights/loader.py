# SPDX-License-Identifier: Apache-2.0
"""Load a model: read its description, check it against the options, then fill its weights, with a progress bar."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from blink.config import FITTING_LENGTH, KV_CACHE_DTYPES, ModelConfig, parse_object
from blink.errors import ConfigError
from blink.formats.fp8 import FP8
from blink.formats.gguf_experts import pack_experts
from blink.formats.schemes import FormatId
from blink.kernels.gpu.attention import heads
from blink.kernels.gpu.latent import sizes
from blink.kernels.operands import KvScales
from blink.models.decoder import Decoder
from blink.models.families import FAMILIES
from blink.models.layers import Attention
from blink.models.spec import ModelSpec
from blink.models.weights import gguf_file
from blink.models.weights.checkpoint import Checkpoint, DummyCheckpoint, GgufCheckpoint, SafetensorsCheckpoint
from blink.models.weights.decoder_loader import DecoderLoader, Place, WeightTarget
from blink.models.weights.dummy_gguf import DummyGguf
from blink.models.weights.files import resolve_model
from blink.models.weights.kept_blocks import KEEP_ON_CPU, KeepBlocks
from blink.models.weights.kv_scales import read_kv_scales
from blink.models.weights.overwriting import Overwrite, PartCheck, UnreadCheckpoint
from blink.models.weights.planar import pack_gguf
from blink.models.weights.pooling_files import read_pooling
from blink.models.weights.quantized_checkpoint import DummyMatrices, Fp8Checkpoint, QuantizedCheckpoint
from blink.models.weights.rank_matrices import RankParts
from blink.models.weights.source import check_method, find_format, read_spec
from blink.models.weights.token_table import choose_table_device, let_gpu_read

logger = logging.getLogger("blink.model")

# Beyond it the rotary table alone takes a GiB, and a description that says more is more likely damaged than right.
_MAX_CONTEXT = 1 << 21
_FP8_GPU = (8, 9)  # compute capability, from which on the GPU converts FP8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute type of that name; "auto" is float32 on the CPU and bfloat16 elsewhere.

    Raises:
        ConfigError: there is no such type.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name} is not supported; use auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def load_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Load the model that the configuration names, with its weights on `device` in `dtype`.

    Matrices of a GGUF file stay as they are stored where the device's kernels take them, unless a type was asked for.

    Raises:
        ConfigError: the model is missing, incomplete or not supported; the message says what to do.
    """
    return open_model(config, device, dtype).load()


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is described and whose files are open."""

    config: ModelConfig
    spec: ModelSpec
    target: WeightTarget
    checkpoint: Checkpoint
    kv_scales: Sequence[KvScales]
    table_device: torch.device

    def load(self, place: Place | None = None) -> Decoder:
        """Load the whole model; place: as DecoderLoader has it.

        Raises:
            ConfigError: a weight is missing, of another shape, or there is no memory.
        """
        return self._lock(self._load(self.checkpoint, self.spec, self.target.device, place))

    def check_over(self, model: Decoder) -> None:
        """Check that all weights could be written over a model's own, of which one layer at a time exists twice.

        Raises:
            ConfigError: one is missing, or differs in more than its values from that of the model.
        """
        checkpoint = UnreadCheckpoint(self.checkpoint)
        target = replace(self.target, advance=int)
        DecoderLoader(checkpoint, self.spec, target, self.kv_scales, self.table_device, PartCheck(model)).load()

    def write_over(self, model: Decoder) -> None:
        """Write all weights over those of a model, in the same memory.

        Raises:
            ConfigError: as check_over(); of the model's weights some then are new and others are not.
        """
        self._load(self.checkpoint, self.spec, self.target.device, Overwrite(model))

    def split(self, size: int, devices: Sequence[torch.device] = ()) -> Callable[[int], Decoder]:
        """Return what loads the part of one of so many ranks; each is to call it, on a thread of its own.

        devices: each rank's, where they differ.

        Raises:
            ConfigError: the size does not divide the model.
        """
        parts = RankParts(self.checkpoint, self.spec, size)

        def load(rank: int) -> Decoder:
            try:
                device = devices[rank] if devices else self.target.device
                return self._lock(self._load(parts.open(rank, device), parts.specs[rank], device))
            except BaseException as error:
                parts.fail(error)
                raise

        return load

    def _load(
        self, checkpoint: Checkpoint, spec: ModelSpec, device: torch.device, place: Place | None = None
    ) -> Decoder:
        with tqdm(
            total=spec.num_parameters,
            desc="loading weights",
            unit=" parameters",
            unit_scale=True,
            disable=True if spec.shard.rank else None,  # None: where no terminal is
        ) as progress:
            target = replace(self.target, device=device, advance=progress.update)
            table_device = device if self.table_device == self.target.device else self.table_device
            return DecoderLoader(checkpoint, spec, target, self.kv_scales, table_device, place).load()

    def _lock(self, model: Decoder) -> Decoder:
        """Let the GPU read what lies in the host's memory, and return the model."""
        if self.table_device != self.target.device and model.inputs is not None:
            let_gpu_read(model.inputs.table)
        return model


def open_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, newer: Sequence[Path] = ()
) -> ModelSource:
    """Describe the model that the configuration names, and open its files, for weights on `device` in `dtype`.

    newer: safetensors files with tensors that stand for the model's own.

    Raises:
        ConfigError: as load_model().
    """
    path = resolve_model(config.model)
    check_method(path, config.quantization)
    changes = parse_object("hf_overrides", config.hf_overrides)
    spec = _limit_length(read_spec(path, changes), config.max_model_len)
    spec = replace(spec, pooling=read_pooling(path, config, spec.architecture))
    if device.type == "cuda":
        _check_heads(spec)
    table_device = choose_table_device(config.per_layer_embeddings, spec, device, dtype)
    kv_dtype = _choose_kv_dtype(config, device, dtype)
    target = WeightTarget(device, dtype, int, kv_dtype)
    checkpoint = open_checkpoint(path, spec, config, target, newer)
    kv_scales: list[KvScales] = []
    if kv_dtype == FP8:
        is_stored = find_format(path, config.load_format) == "safetensors"
        kv_scales = read_kv_scales(path if is_stored else None, spec.num_layers)
    return ModelSource(config, spec, target, checkpoint, kv_scales, table_device)


def _check_heads(spec: ModelSpec) -> None:
    """Refuse a model for a GPU that has no attention for its heads, before memory is taken for the weights.

    Raises:
        ConfigError: it has none.
    """
    reasons = filter(None, map(_refuse_heads, spec.attentions))
    if reason := next(reasons, None):
        raise ConfigError(f"The GPU's paged attention does not take {reason}: use --device cpu, or another model.")


def _refuse_heads(attention: Attention) -> str | None:
    if attention.latent is None:
        return heads.refuses(attention.head_dim)
    return sizes.refuses(attention.latent.rank, attention.latent.rope)


def _choose_kv_dtype(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type of keys and values: a CPU keeps them in 16 bits unless `--dtype` asks for another.

    Raises:
        ConfigError: the option has no such value, or the device cannot.
    """
    name = config.kv_cache_dtype
    if name not in KV_CACHE_DTYPES:
        raise ConfigError(f"--kv-cache-dtype {name} is not supported; use {', '.join(KV_CACHE_DTYPES)}.")
    is_chosen = name == "float16" or (name == "auto" and config.dtype == "auto")
    if device.type == "cpu" and dtype == torch.float32 and is_chosen:
        return torch.float16
    if name in _DTYPES and _DTYPES[name] != dtype:
        raise ConfigError(
            f"--kv-cache-dtype {name}: keys and values have the compute type or FP8; give --dtype {name}."
        )
    if name == "auto" or name in _DTYPES:
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_GPU:
        raise ConfigError(
            f"--kv-cache-dtype {name} needs a GPU of compute capability 8.9 or later (Ada, Hopper): leave it out."
        )
    return FP8


def _limit_length(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    if max_model_len > spec.max_model_len:
        raise ConfigError(
            f"--max-model-len {max_model_len} is too much for the model; use at most {spec.max_model_len}."
        )
    if max_model_len == FITTING_LENGTH:  # the engine shortens it further
        return spec.limit(min(spec.max_model_len, _MAX_CONTEXT))
    length = max_model_len or spec.max_model_len
    if length > _MAX_CONTEXT:
        raise ConfigError(
            f"The model's context of {length} tokens is too long; give --max-model-len {_MAX_CONTEXT} or less."
        )
    return spec.limit(length)


def _keep_blocks(device: torch.device, dtype: torch.dtype) -> KeepBlocks | None:
    """Return how a GGUF file's matrices stay quantised; None: the device has no kernels for that type."""
    if device.type == "cpu":
        return KEEP_ON_CPU if dtype == torch.float32 else None
    if dtype == torch.float32:
        return None
    if torch.cuda.get_device_capability(device) < gguf_file.KEEPING_GPU:
        return None
    return KeepBlocks(functools.partial(pack_gguf, dtype=dtype), device, pack_experts)


def open_checkpoint(
    path: Path,
    spec: ModelSpec,
    config: ModelConfig,
    target: WeightTarget,
    newer: Sequence[Path] = (),
    *,
    is_mtp: bool = False,
) -> Checkpoint:
    """Open a model's files, or of them the layer that predicts one token further.

    Raises:
        ConfigError: they cannot be read, or do not go with the options.
    """
    device, dtype = target.device, target.dtype
    load_format, quantization = find_format(path, config.load_format), spec.quantization
    is_asked = config.dtype != "auto" or config.quantization == "fp8"
    keep = None if is_asked or not path.is_file() else _keep_blocks(device, dtype)
    if quantization is not None and config.quantization == "fp8" and quantization.format is not FormatId.FP8:
        raise ConfigError(f"--quantization fp8: {path} has matrices of {quantization.title} already; leave it out.")
    if load_format == "dummy":
        checkpoint = DummyCheckpoint(device, config.seed)
        if quantization is not None:
            return DummyMatrices(checkpoint, quantization)
        if keep is not None:
            return DummyGguf(path, spec, keep, checkpoint)
    elif load_format == "gguf":
        checkpoint = GgufCheckpoint(path, spec, keep)
        _log_drafts(path, checkpoint.num_drafts, "is not loaded")
    else:
        checkpoint = SafetensorsCheckpoint(path, spec, newer, is_mtp=is_mtp)
        _log_drafts(path, checkpoint.num_drafts, "is loaded" if is_mtp else "may be loaded by --speculative-config")
        if quantization is not None:
            return QuantizedCheckpoint(checkpoint, quantization)
    if config.quantization != "fp8":
        return checkpoint
    names = FAMILIES[spec.architecture].experts
    if names is not None and names.are_joined:
        logger.warning("--quantization fp8: the experts of %s stay in %s", spec.architecture, dtype)
    return Fp8Checkpoint(checkpoint)


def _log_drafts(path: Path, count: int, told: str) -> None:
    if count:
        logger.info("%s: the draft layer (MTP) of %d tensors %s", path, count, told)
