# SPDX-License-Identifier: Apache-2.0
"""Layers of attention and a gated MLP in one call, csrc/cpu/layers.h: of steps whose tokens attend one by one.

Its operations are those that other steps call one by one. So a row has the same bits in both.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np
import torch

from blink.kernels.batch import Header
from blink.kernels.cpu.attention import LANES, MOST_HEAD_DIM, NATIVE_CELLS, plan_attention
from blink.kernels.cpu.gguf_weight import find_address
from blink.kernels.cpu.thread_pool import find_thread_pool
from blink.kernels.layer_cache import KvCache
from blink.kernels.rounding import rounds_activations
from blink.models.decoder import Decoder
from blink.models.layer_weights import LayerWeights
from blink.models.layers import Attention, LayerSpec
from blink.region.layout import new_struct, struct_dtype
from blink.region.native import lib
from blink.runner.step import Step
from blink.runner.stream import RunLayers, Stream


class NativeLayers:
    """The layers of a model with a KV cache, as the native library takes them."""

    def __init__(self, model: Decoder, kv_cache: KvCache) -> None:
        """Describe them; without any if the library lacks something that they are made of."""
        self._cache = weakref.ref(kv_cache)
        self._windows: list[int] = []
        self._words = np.zeros(0, struct_dtype("DenseLayer"))
        if not _are_native(model, kv_cache):
            return
        mixers = [spec.mixer.attention for spec in model.spec.layers if spec.mixer.attention is not None]
        self._windows = [*dict.fromkeys(one.window for one in mixers)]
        self._words = np.zeros(len(mixers), struct_dtype("DenseLayer"))
        for index, (layer, mixer) in enumerate(zip(model.layers, mixers, strict=True)):
            self._words[index] = _describe(layer, mixer, kv_cache, index)
            self._words[index]["rotation"] = model.table_of[index]
            self._words[index]["group"] = self._windows.index(mixer.window)

    def is_of(self, kv_cache: KvCache) -> bool:
        """Whether this is the KV cache."""
        return self._cache() is kv_cache

    def find_run(self, step: Step, layers: range) -> RunLayers | None:
        """Return what runs some layers in a step; None: nothing does, or a prompt does not attend token by token."""
        if len(self._words) == 0 or step.updates is not None or step.ranks.size > 1:
            return None
        groups = _KeyGroups(step, self._windows)
        return functools.partial(self._run, step, layers, groups) if groups.rows > 0 else None

    def _run(self, step: Step, layers: range, groups: _KeyGroups, stream: Stream) -> None:
        """Add what some layers compute to the residual."""
        model, cache, residual = step.model, step.kv_cache.first, stream.residual
        rows = groups.rows
        rotations = [table.index_select(0, step.batch.positions[:rows]) for table in model.rotary_tables]
        update = torch.zeros_like(residual)
        tables = np.array([one.data_ptr() for one in rotations], np.uint64)
        words = new_struct(
            "DenseStep",
            residual=residual.data_ptr(),
            update=update.data_ptr(),
            rotations=tables.ctypes.data,
            groups=groups.words.ctypes.data,
            rows=rows,
            hidden=residual.shape[1],
            rotary_dim=rotations[0].shape[1],
            block_size=cache.block_size,
            is_half=cache.dtype == torch.float16,
            rounds=rounds_activations(),
        )
        words["eps"] = model.spec.rms_norm_eps
        some = self._words[layers.start : layers.stop]
        lib.blink_run_layers(words.ctypes.data, some.ctypes.data, len(some), find_thread_pool())
        stream.put(update)


class _KeyGroups:
    """Where keys are and go, for the layers of each window."""

    def __init__(self, step: Step, windows: list[int]) -> None:
        cache, tokens = step.kv_cache.first, int(step.batch.header[Header.NUM_TOKENS])
        find_thread_pool()  # which the plan asks for
        plan = plan_attention(step.batch, tokens, cache.block_size, step.model.dtype, by_token=step.deterministic)
        self.rows = tokens if plan.are_all_short() else 0  # of one token each; 0: some attend together
        if self.rows == 0:
            return
        self._groups = [plan.find_groups(window)[0] for window in windows]  # whose memory the words name
        self.words = np.zeros(len(windows), struct_dtype("KeyGroup"))
        for index, (group, window) in enumerate(zip(self._groups, windows, strict=True)):
            slots = step.batch.find_kv_slots(window).data_ptr()
            tensors = group.blocks.data_ptr(), group.positions.data_ptr()
            self.words[index] = slots, *tensors, group.blocks.shape[0] // tokens


def _are_native(model: Decoder, kv_cache: KvCache) -> bool:
    tables = {table.shape[1] for table in model.rotary_tables}
    is_plain = model.dtype == torch.float32 and model.inputs is None and len(tables) == 1
    if not is_plain or kv_cache.recurrent or not all(one.dtype in NATIVE_CELLS for one in kv_cache):
        return False
    return all(_is_native(*pair) for pair in zip(model.spec.layers, model.layers, strict=True))


def _is_native(spec: LayerSpec, layer: LayerWeights) -> bool:
    attention, mlp = spec.mixer.attention, layer.mlp
    if attention is None or [*mlp.sites] != ["dense"] or mlp.biases != (None, None) or spec.norm_biases:
        return False
    weights = layer.qkv, layer.output, mlp.gate_up, mlp.down
    others = (
        attention.latent, attention.output_gate, attention.query_growth, attention.value_norm, attention.chunk,
        layer.output_bias is not None, layer.attention_end_norm is not None, layer.mlp_end_norm is not None,
        layer.wide_norm, layer.recurrent, layer.end, layer.attention_norm is None, layer.mlp_norm is None,
    )  # fmt: skip
    has_own_keys = attention.kv_source is None
    fits = attention.head_dim % LANES == 0 and attention.head_dim <= MOST_HEAD_DIM and spec.residual_scale == 1
    is_gated = getattr(mlp, "activation", None) == "silu" and mlp.gate_up.shape[0] == 2 * mlp.down.shape[1]
    return fits and has_own_keys and is_gated and not any(others) and all(find_address(one) for one in weights)


def _describe(layer: LayerWeights, mixer: Attention, kv_cache: KvCache, index: int) -> Any:
    """Return csrc's DenseLayer."""
    cache, norm, options = kv_cache[index], layer.head_norm, layer.attention
    assert cache.cells.is_contiguous()
    tensors: dict[str, Any] = {
        "attention_norm": layer.attention_norm, "mlp_norm": layer.mlp_norm, "qkv_bias": layer.qkv_bias,
        "sinks": options.sinks, "cells": cache.cells,
    }  # fmt: skip
    if norm is not None:
        tensors |= {"query_norm": norm.query_weight, "key_norm": norm.key_weight}
    weights: dict[str, Any] = {
        "qkv": layer.qkv, "output": layer.output, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down,
    }  # fmt: skip
    words = new_struct(
        "DenseLayer",
        **{name: one.data_ptr() for name, one in tensors.items() if one is not None},
        **{name: find_address(one) for name, one in weights.items()},
        cache_rows=cache.num_blocks * cache.block_size,
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        window=mixer.window,
    )
    words["scale"], words["softcap"] = options.scale_for(mixer.head_dim), options.softcap
    words["head_eps"] = 0 if norm is None else norm.eps
    return words
