# SPDX-License-Identifier: Apache-2.0
"""Load a model: read its description, then fill its weights layer by layer, with a progress bar."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.kernels.linear import pack_weight
from blink.kernels.operands import HeadNorm
from blink.models.decoder import Decoder
from blink.models.layer import DenseMlp, Layer, MoeMlp
from blink.models.spec import ModelSpec
from blink.models.weights.checkpoint import Checkpoint, DummyCheckpoint, GgufCheckpoint, SafetensorsCheckpoint
from blink.models.weights.files import resolve_model
from blink.models.weights.source import find_format, read_spec

# Beyond it the rotary table alone takes a GiB, and a description that says more is more likely damaged than right.
_MAX_CONTEXT = 1 << 21
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

    Raises:
        ConfigError: the model is missing, incomplete or not supported; the message says what to do.
    """
    path = resolve_model(config.model)
    spec = _limit_length(read_spec(path), config.max_model_len)
    checkpoint = _open_checkpoint(path, spec, config, device)
    num_bytes = spec.num_parameters * dtype.itemsize
    with tqdm(
        total=num_bytes,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=None,  # where no terminal is
    ) as progress:
        return _Loader(checkpoint, spec, device, dtype, progress).load()


def _limit_length(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    if max_model_len > spec.max_model_len:
        raise ConfigError(
            f"--max-model-len {max_model_len} is too much for the model; use at most {spec.max_model_len}."
        )
    length = max_model_len or spec.max_model_len
    if length > _MAX_CONTEXT:
        raise ConfigError(
            f"The model's context of {length} tokens is too long; give --max-model-len {_MAX_CONTEXT} or less."
        )
    return dataclasses.replace(spec, max_model_len=length)


def _open_checkpoint(path: Path, spec: ModelSpec, config: ModelConfig, device: torch.device) -> Checkpoint:
    load_format = find_format(path, config.load_format)
    if load_format == "dummy":
        return DummyCheckpoint(device, config.seed)
    return GgufCheckpoint(path, spec) if load_format == "gguf" else SafetensorsCheckpoint(path)


class _Loader:
    """Builds a decoder from a checkpoint, one tensor at a time, so that at most one exists twice."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        progress: tqdm[NoReturn],
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._progress = progress

    @torch.inference_mode()
    def load(self) -> Decoder:
        spec = self._spec
        embedding = self._read("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        layers = [self._load_layer(f"model.layers.{index}") for index in range(spec.num_layers)]
        norm = self._read("model.norm.weight", spec.hidden_size)
        lm_head = embedding if spec.tie_embeddings else self._read("lm_head.weight", spec.vocab_size, spec.hidden_size)
        return Decoder(spec, embedding, layers, norm, pack_weight(lm_head))

    def _load_layer(self, prefix: str) -> Layer:
        spec = self._spec
        attention = f"{prefix}.self_attn"
        if spec.architecture == "phi3":
            qkv = {f"{attention}.qkv_proj": spec.q_size + 2 * spec.kv_size}
        else:
            qkv = {
                f"{attention}.q_proj": spec.q_size,
                f"{attention}.k_proj": spec.kv_size,
                f"{attention}.v_proj": spec.kv_size,
            }
        output = {f"{attention}.o_proj": spec.hidden_size}
        return Layer(
            attention_norm=self._read(f"{prefix}.input_layernorm.weight", spec.hidden_size),
            qkv=pack_weight(self._stack("weight", qkv, spec.hidden_size)),
            qkv_bias=self._stack("bias", qkv) if spec.attention_bias else None,
            output=pack_weight(self._stack("weight", output, spec.q_size)),
            output_bias=self._stack("bias", output) if spec.attention_bias else None,
            head_norm=self._load_head_norm(attention) if spec.qk_norm else None,
            mlp_norm=self._read(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
            mlp=self._load_moe(f"{prefix}.mlp") if spec.num_experts else self._load_dense(f"{prefix}.mlp"),
        )

    def _load_head_norm(self, prefix: str) -> HeadNorm:
        query, key = (self._read(f"{prefix}.{name}.weight", self._spec.head_dim) for name in ("q_norm", "k_norm"))
        return HeadNorm(query, key, self._spec.rms_norm_eps)

    def _load_dense(self, prefix: str) -> DenseMlp:
        spec = self._spec
        size = spec.intermediate_size
        if spec.architecture == "phi3":
            gate_up = {f"{prefix}.gate_up_proj": 2 * size}
        else:
            gate_up = {f"{prefix}.gate_proj": size, f"{prefix}.up_proj": size}
        return DenseMlp(
            gate_up=pack_weight(self._stack("weight", gate_up, spec.hidden_size)),
            down=pack_weight(self._read(f"{prefix}.down_proj.weight", spec.hidden_size, size)),
        )

    def _load_moe(self, prefix: str) -> MoeMlp:
        spec = self._spec
        size = spec.moe_intermediate_size
        router = pack_weight(self._read(f"{prefix}.gate.weight", spec.num_experts, spec.hidden_size))
        for expert in range(spec.num_experts):
            self._checkpoint.check(f"{prefix}.experts.{expert}.gate_proj.weight", (size, spec.hidden_size))
            self._checkpoint.check(f"{prefix}.experts.{expert}.up_proj.weight", (size, spec.hidden_size))
            self._checkpoint.check(f"{prefix}.experts.{expert}.down_proj.weight", (spec.hidden_size, size))
        gate_up = self._allocate(spec.num_experts, 2 * size, spec.hidden_size)
        down = self._allocate(spec.num_experts, spec.hidden_size, size)
        for expert in range(spec.num_experts):
            name = f"{prefix}.experts.{expert}"
            self._fill(f"{name}.gate_proj.weight", gate_up[expert, :size])
            self._fill(f"{name}.up_proj.weight", gate_up[expert, size:])
            self._fill(f"{name}.down_proj.weight", down[expert])
        return MoeMlp(router, gate_up, down)

    def _stack(self, ending: str, parts: dict[str, int], *columns: int) -> Tensor:
        """Read tensors of the given numbers of rows into one, one below the other."""
        for name, rows in parts.items():
            self._checkpoint.check(f"{name}.{ending}", (rows, *columns))
        target = self._allocate(sum(parts.values()), *columns)
        for name, part in zip(parts, target.split(list(parts.values())), strict=True):
            self._fill(f"{name}.{ending}", part)
        return target

    def _read(self, name: str, *shape: int) -> Tensor:
        self._checkpoint.check(name, shape)
        target = self._allocate(*shape)
        self._fill(name, target)
        return target

    def _allocate(self, *shape: int) -> Tensor:
        try:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        except RuntimeError as error:  # torch has no type of its own for it on the CPU
            raise ConfigError(f"There is no memory for a tensor of the shape {shape}: use a smaller model.") from error

    def _fill(self, name: str, target: Tensor) -> None:
        self._checkpoint.fill(name, target)
        self._progress.update(target.nbytes)
