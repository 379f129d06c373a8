# SPDX-License-Identifier: Apache-2.0
"""`blink doctor MODEL`: whether a model fits a machine, and how fast it can be. Loads no weights, no torch."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import safe_open

from blink.cli.finding import Finding
from blink.cli.head_fit import examine_head
from blink.cli.plan import PlanConfig
from blink.cli.torch_probe import Gpu, probe_torch
from blink.config import EngineConfig
from blink.engine.cache_size import CacheShape
from blink.engine.geometry import count_slots, fit_sequences, spare_snapshots
from blink.engine.rank_fit import DEFAULT_STEP_TOKENS, GRAPH_BYTES, GpuRoom, describe_part, list_needs
from blink.errors import BlinkError, ConfigError
from blink.fields import one_line
from blink.formats.schemes import FP8_ROWS
from blink.host.process import read_available_memory
from blink.hub.localize import find_cached
from blink.models.families import FAMILIES
from blink.models.spec import ModelSpec
from blink.models.weight_bytes import WeightBytes, count_weights
from blink.models.weights.files import resolve_model
from blink.models.weights.gguf_file import KEEPING_GPU, GgufFile
from blink.models.weights.shards import list_shards
from blink.models.weights.source import check_method, read_spec
from blink.plan.gpus import find_gpu

_GIB: Final = 2**30
_MIB: Final = 2**20
_KIB: Final = 2**10
_NO_OPTIONS: Final = PlanConfig()
_NO_ENGINE_OPTIONS: Final = EngineConfig()
_PROBE_BYTES: Final = 128 << 20
_PROBE_RUNS: Final = 3


def examine_given_model(model: str, options: PlanConfig = _NO_OPTIONS) -> Iterator[Finding]:
    """Look at a model's files, and hold them against memory and bandwidth of this machine or of a named GPU.

    Raises:
        ConfigError: no GPU of that name is known.
    """
    gpu = _choose_gpu(options.gpu)
    try:
        path = resolve_model(find_cached(model))
        check_method(path, options.quantization)
        spec = _quantize(read_spec(path), options.quantization)
        part = spec if gpu is None or path.is_file() else options.take_part(spec)
        stored = _read_precision(path)
    except BlinkError as error:
        yield Finding("fail", "model", error.message)
        return
    yield Finding("ok", "model", f"{FAMILIES[spec.architecture].title}: {_describe(spec)}")
    name, size = ("bfloat16", 2) if gpu else ("float32", 4)
    weights = count_weights(part, size, stays_quantized=gpu is not None)
    speculation = EngineConfig(speculative_config=options.speculative_config).speculation
    text = f"stored as {stored}, computed in {name} unless --dtype says otherwise"
    if path.is_file() and _keeps_blocks(gpu):
        weights = _count_gguf(path, spec, size)
        text += "; without it quantised matrices stay as they are stored"
    yield Finding("ok", "precision", text)
    spec, part = (replace(one, rollback=speculation.num_tokens) for one in (spec, part))
    part, head_bytes, finding = examine_head(part, speculation, size, on_gpu=gpu is not None)
    if finding is not None:
        yield finding
    weights = WeightBytes(weights.total + head_bytes, weights.read + head_bytes)
    if part.shard.size > 1:
        yield Finding("ok", "rank", f"{describe_part(part)}; what follows is of its GPU")
    yield Finding("ok", "sequence", _describe_sequence(part, size))
    share = EngineConfig().gpu_memory_utilization
    room = int(gpu.memory * share) - GRAPH_BYTES if gpu else read_available_memory()
    yield from _examine_room(part, room, weights, size, options.max_num_seqs)
    if gpu and not path.is_file():
        yield _examine_ranks(spec, room, size, options)
    where, bandwidth = (gpu.name, gpu.bandwidth) if gpu else ("these cores", _measure_bandwidth())
    yield from _examine_speed(weights, where, bandwidth)


def _choose_gpu(name: str) -> Gpu | None:
    """Return the GPU of a name, or else this machine's first; None: there is none."""
    if not name:
        return next(iter(probe_torch().gpus), None)
    known = find_gpu(name)
    return Gpu(known.name, known.memory, known.bandwidth, *known.capability)


def _quantize(spec: ModelSpec, quantization: str) -> ModelSpec:
    """Return a model with what --quantization makes of its matrices."""
    if quantization != "fp8" or spec.quantization is not None:
        return spec
    return replace(spec, quantization=replace(FP8_ROWS, output=FP8_ROWS))


def _describe_sequence(spec: ModelSpec, size: int) -> str:
    """Say what the layers keep of one sequence of the longest context; size: bytes of a number."""
    layout, shape = spec.cache_layout, _shape_cache(spec, size)
    text = f"one of {spec.max_model_len} tokens keeps {shape.bytes_of_longest / _GIB:.2f} GiB of keys and values"
    token, window = layout.block_bytes(1, size)
    if layout.window:
        text += f", {token / _KIB:g} KiB a token and {window / _KIB:g} KiB for each of the newest {layout.window}"
    else:
        text += f", {token / _KIB:g} KiB a token"
    states = layout.bytes_per_sequence(size)
    return f"{text}, and {states / _MIB:.1f} MiB of states" if states else text


def _shape_cache(spec: ModelSpec, size: int) -> CacheShape:
    """Return what sequences take of the KV cache of a GPU engine with the defaults; size: bytes of a number."""
    return CacheShape(
        layout=spec.cache_layout,
        block_size=_NO_ENGINE_OPTIONS.block_size if spec.cache_layout.window else 1,
        itemsize=size,
        max_model_len=spec.max_model_len,
        step_tokens=_NO_ENGINE_OPTIONS.max_num_batched_tokens or DEFAULT_STEP_TOKENS,
    )


def _count_tokens(spec: ModelSpec, room: int, size: int) -> tuple[int, str]:
    """Return how many tokens of all sequences the KV cache of some bytes holds, and say how many in a window's layers.

    size: bytes of a number.
    """
    shape = _shape_cache(spec, size)
    found = shape.divide(room)
    shown = (
        f" ({found.num_window_blocks * shape.block_size} in layers with a window)" if spec.cache_layout.window else ""
    )
    return found.num_blocks * shape.block_size, shown


def _describe(spec: ModelSpec) -> str:
    text = f"{spec.num_parameters / 1e9:.2f} billion parameters, {spec.num_layers} layers"
    if spec.quantization is not None:
        text += f", matrices in {spec.quantization.title}"
    if spec.output_quantization is not None:
        text += f", output layer in {spec.output_quantization.title}"
    if spec.mixture is not None:
        text += f", {spec.mixture.router.top_k} of {spec.mixture.experts} experts per token"
    return f"{text}, context of {spec.max_model_len} tokens"


def _read_precision(path: Path) -> str:
    """Return the type of most of the stored bytes.

    Raises:
        ConfigError: the files cannot be read.
    """
    kinds = Counter[str]()
    if path.is_file():
        for tensor in GgufFile(path).tensors.values():
            kinds[tensor.kind.name] += tensor.num_bytes
    else:
        for shard in list_shards(path):
            kinds.update(_count_shard(shard))
    return kinds.most_common(1)[0][0] if kinds else "nothing (no weights here)"


def _count_shard(shard: Path) -> Counter[str]:
    kinds = Counter[str]()
    try:
        with safe_open(shard, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                part = file.get_slice(name)
                kinds[part.get_dtype()] += math.prod(part.get_shape())
    except Exception as error:  # the library's error type is not public
        raise ConfigError(f"{shard} is not a readable safetensors file ({one_line(error)}).") from error
    return kinds


def _keeps_blocks(gpu: Gpu | None) -> bool:
    """Tell whether an engine keeps a GGUF file's matrices quantised."""
    return gpu is None or (gpu.major, gpu.minor) >= KEEPING_GPU


def _count_gguf(path: Path, spec: ModelSpec, plain_size: int) -> WeightBytes:
    """Count what an engine keeps of a GGUF file, and what it reads of that for one token.

    plain_size: bytes of a number that does not stay quantised; 4 on a CPU.
    """
    total, read, on_gpu = 0, 0.0, plain_size < 4
    share = spec.mixture.router.top_k / spec.mixture.experts if spec.mixture else 0.0  # of the experts that are read
    for name, tensor in GgufFile(path).tensors.items():
        size = math.prod(tensor.shape) * plain_size
        if tensor.can_stay_quantized(on_gpu=on_gpu):
            size = tensor.gpu_bytes if on_gpu else tensor.num_bytes
        total += size
        if "_exps." in name:
            read += size * share
        elif spec.tie_embeddings or not name.startswith("token_embd"):
            read += size
    return WeightBytes(total, int(read))


def _examine_room(
    spec: ModelSpec,
    room: int,
    weights: WeightBytes,
    size: int,
    max_num_seqs: int = _NO_OPTIONS.max_num_seqs,
) -> Iterator[Finding]:
    text = f"{weights.total / _GIB:.2f} GiB of {room / _GIB:.2f} GiB that are free"
    if weights.total > room:
        yield Finding("fail", "weights", text, "take a smaller model, or a machine with more memory")
        return
    yield Finding("ok", "weights", text)
    if states := spec.cache_layout.bytes_per_sequence(size):
        if max_num_seqs == _NO_OPTIONS.max_num_seqs:
            max_num_seqs = fit_sequences(max_num_seqs, room - weights.total, states)
        slots = count_slots(max_num_seqs)
        text = f"recurrent layers keep {states / _MIB:.1f} MiB of each sequence, whatever its length"
        text += f"; {slots * states / _GIB:.2f} GiB with --max-num-seqs {max_num_seqs}"
        if weights.total + slots * states > room:
            fitting = max((room - weights.total) // (2 * states), 0)
            yield Finding("warn", "states", text, f"--max-num-seqs {max(fitting // 2, 1)} or less")
            slots = 0
        else:
            yield Finding("ok", "states", text)
        room = weights.total + spare_snapshots(room - weights.total - slots * states, states)
    tokens, shown = _count_tokens(spec, room - weights.total, size)
    text = f"{tokens} tokens{shown} fit beside them; one sequence may have {spec.max_model_len}"
    text += f"; {_count_tokens(spec, room - weights.total, 1)[0]} tokens with --kv-cache-dtype fp8"
    if tokens < spec.max_model_len:
        yield Finding("warn", "KV cache", text, f"--max-model-len {max(tokens // 2, 2)} or less")
    else:
        yield Finding("ok", "KV cache", text)


def _examine_ranks(spec: ModelSpec, room: int, size: int, options: PlanConfig) -> Finding:
    """Say what each of several GPUs would hold; size: bytes of a number."""
    tokens = options.max_num_batched_tokens or DEFAULT_STEP_TOKENS
    of_gpu = GpuRoom(room, options.block_size, size, tokens, options.max_num_seqs)
    shown: list[str] = []
    for one in list_needs(spec, lambda part: count_weights(part, size, stays_quantized=True).total, of_gpu):
        blocks = f"{one.num_blocks} KV blocks" if one.fits else "too little room"
        shown.append(f"{one.size}: {one.weight_bytes / _GIB:.1f} GiB and {blocks}")
    return Finding("ok", "GPUs", f"what each holds, by --tensor-parallel-size: {'; '.join(shown)}")


def _examine_speed(weights: WeightBytes, where: str, bandwidth: float) -> Iterator[Finding]:
    if not bandwidth:
        yield Finding("warn", "speed", f"the memory bandwidth of {where} is not known")
        return
    text = f"{weights.read / _GIB:.2f} GiB at {bandwidth / 1e9:.0f} GB/s ({where})"
    yield Finding("ok", "speed", f"about {weights.read / bandwidth * 1e3:.2f} ms per token: {text}")


def _measure_bandwidth() -> float:
    """Return the bytes per second that all cores read and write together, copying."""
    workers = len(os.sched_getaffinity(0))
    source = [np.ones(_PROBE_BYTES // workers, np.uint8) for _ in range(workers)]
    target = [np.ones_like(part) for part in source]
    best = math.inf
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(_PROBE_RUNS):
            start = time.perf_counter()
            list(pool.map(np.copyto, target, source))
            best = min(best, time.perf_counter() - start)
    return 2 * _PROBE_BYTES / best
