# SPDX-License-Identifier: Apache-2.0
"""Find the fastest configs of decoding rows' kernels on this GPU and write them to the table that the server reads.

What counts is a whole step of a few layers, replayed as a graph: kernels overlap their neighbours, and rows have
contexts of different lengths. One kernel after the other is tried with every tile config that fits; the fastest stays.
With --load those that are nearly as fast are compared once more, each replayed for so many seconds, in which a GPU at
its limit of power lowers its clock; what this finds stays if the step is then faster than before.

Run with: python benchmarks/kernels/tune_decode.py [--models llama-3-8b] [--rows 8 16 32 64] [--format fp8]

Dense models in 16 and in 4 bits take up to 128 rows, the others 64. `attend 1024 x 8` is set by hand: where all
contexts are equal, fewer blocks for each row are faster than what the tuner takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from decode_layer import Case, Model, attention_of, capture_graph, time_graph, time_under_load
from torch import Tensor

import blink.models
from blink.formats.base import Weight, plain
from blink.formats.fp8 import quantize_fp8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import PackedWeight, pack
from blink.formats.schemes import GROUP, FormatId
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import decode_hi_lo, gemv_quantized, tile_configs
from blink.kernels.gpu.gemm.pipeline_config import Shape
from blink.kernels.gpu.gemm.tile_configs import Output
from blink.kernels.gpu.launch import compile_ahead
from blink.models.decoder import Decoder
from blink.models.layer_weights import DenseWeights, LayerWeights, MoeWeights
from blink.models.mlps import MoeMlp
from blink.models.spec import ModelSpec
from blink.models.weights.source import read_spec
from blink.runner.gpu_device import MAX_INT4_ROWS_BEFORE_HI_LO

_CONFIGS = Path(blink.models.__path__[0]) / "configs"
_MODELS = ("llama-3-8b", "phi-4", "qwen3-32b", "qwen3-30b-a3b")
_LAYERS = 6
_EXPERT_SIZE = 64
_CONTEXT = 500
_TOLERANCE = 5e-2  # sums in another order, through some layers
_CLOSE, _MOST_CLOSE = 1.035, 6  # times the fastest, and how many: what is compared under load

Candidates = dict[str, list[list[int]]]
TileConfig = (
    tile_configs.GemmConfig
    | tile_configs.AttentionConfig
    | decode_hi_lo.HiLoGemmConfig
    | gemv_quantized.QuantizedGemvConfig
)


def list_gemms(spec: ModelSpec) -> list[tuple[Output, int, int]]:
    """Return the outputs, weight rows and k of a step's GEMMs, those of most bytes first."""
    hidden, layer = spec.hidden_size, spec.layers[0]
    outputs = [Output.STORE] if layer.mlp.mixture else [Output.GATE, Output.ADD]
    outputs += [Output.STORE, Output.ADD, Output.STORE]
    shapes = [*layer.mlp.matrices(hidden), *layer.mixer.matrices(hidden), (spec.vocab_size, hidden)]
    return [(output, n, k) for output, (n, k) in zip(outputs, shapes, strict=True)]


def list_candidates(spec: ModelSpec, rows: int) -> Candidates:
    """Return the keys of the table that a step uses, each with all configs."""
    tokens = tile_configs.bucket_rows(rows, plain=spec.mixture is None)
    found = {
        tile_configs.gemm_key(output, tokens, n, k): list(map(to_list, tile_configs.list_gemm_configs(output, tokens)))
        for output, n, k in list_gemms(spec)
    }
    attention = attention_of(spec)
    attention_configs = map(to_list, tile_configs.list_attention_configs(attention.group, attention.head_dim))
    return found | {tile_configs.attention_key(rows * attention.kv_heads, attention.group): list(attention_configs)}


def list_quantized_candidates(spec: ModelSpec, rows: int, format: FormatId) -> Candidates:
    """Return the keys of the table that GEMMs with quantized weights use, each with all configs."""
    products = list_gemms(spec)[1 if spec.mixture is not None else 0 :]  # routers have 16 bits
    if format is FormatId.INT4:
        products = products[:-1]  # as the output has
    if format is FormatId.INT4 and rows <= MAX_INT4_ROWS_BEFORE_HI_LO:
        few = [gemv_quantized.Shape(format, True, rows, k, n) for _, n, k in products]
        return {gemv_quantized.key(shape): list(map(to_list, gemv_quantized.list_configs(shape))) for shape in few}
    grouped, tokens = format is FormatId.INT4, tile_configs.bucket_rows(rows)
    kernels = gemm.kernels_for(format, tokens)
    shapes = [Shape(format, grouped, output, tokens, k, n) for output, n, k in products]
    return {kernels.key(shape): list(map(to_list, kernels.list_configs(shape))) for shape in shapes}


def to_list(config: TileConfig) -> list[int]:
    return list(dataclasses.astuple(config))


def compile_candidates(case: Case, candidates: Candidates) -> None:
    """Compile what tune() will try, on all cores."""
    table = tile_configs.read_table()
    kept = dict(table)

    def run() -> None:
        for key, options in candidates.items():
            for table[key] in options:
                case.run_after()

    try:
        compile_ahead(run)
    finally:
        table.clear()
        table.update(kept)


def tune(case: Case, candidates: Candidates, passes: int, load: float) -> Iterator[str]:
    """Put the fastest configs into the table; yield what they gain.

    load: seconds for which each of those that are nearly as fast is replayed once more; 0: none is.
    """
    compile_candidates(case, candidates)
    table = tile_configs.read_table()
    expected = case.run_after().float()
    kept, graph = dict(table), capture_graph(case.run_after)

    def measure(key: str, option: list[int]) -> float:
        table[key] = option
        error = float((case.run_after().float() - expected).norm() / expected.norm())
        if not error < _TOLERANCE:
            raise SystemExit(f"{key} with {option}: logits differ by {error:.1e}")
        return time_graph(case.run_after)

    for key, options in list(candidates.items()) * passes:
        before = time_graph(case.run_after)
        found = sorted((measure(key, option), option) for option in options)
        best, table[key] = found[0]
        if load:
            close = [option for us, option in found[:_MOST_CLOSE] if us < best * _CLOSE]
            table[key] = choose_under_load(case, key, close, load)
        yield f"   {key}: {table[key]}, {before:.1f} to {best:.1f} us"
    if load:
        times = compare_under_load([graph, capture_graph(case.run_after)], load)
        yield f"   under load: {times[0]:.1f} to {times[1]:.1f} us" + "; dropped" * (times[1] >= times[0])
        if times[1] >= times[0]:
            table.clear()
            table.update(kept)


def choose_under_load(case: Case, key: str, options: list[list[int]], seconds: float) -> list[int]:
    """Return the tile config that is the fastest where power sets the clock."""
    table = tile_configs.read_table()
    graphs: list[torch.cuda.CUDAGraph] = []
    for table[key] in options:
        graphs.append(capture_graph(case.run_after))
    times = compare_under_load(graphs, seconds)
    return options[times.index(min(times))]


def compare_under_load(graphs: Sequence[torch.cuda.CUDAGraph], seconds: float) -> list[float]:
    """Return the microseconds of a replay of each, in turns there and back: clocks and temperatures drift."""
    time_under_load(graphs[0], seconds)
    there = [time_under_load(graph, seconds) for graph in graphs]
    back = [time_under_load(graph, seconds) for graph in reversed(graphs)]
    return [(first + second) / 2 for first, second in zip(there, reversed(back), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=_MODELS)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument(
        "--load", type=float, default=0.0, metavar="SECONDS", help="compare the best under load as well"
    )
    parser.add_argument("--format", choices=("fp8", "int4"), help="tune the products with such weights instead")
    parser.add_argument("--only", default="", help="tune what the table names like this, as 'attend'")
    options = parser.parse_args()
    for name in options.models:
        format = FormatId[options.format.upper()] if options.format else None
        model = make_model(name, format)
        for rows in options.rows:
            start = time.monotonic()
            print(f"{name}, {rows} rows", flush=True)
            found = list_quantized_candidates(model.spec, rows, format) if format else list_candidates(model.spec, rows)
            candidates = {key: configs for key, configs in found.items() if configs and key.startswith(options.only)}
            for line in tune(Case(model, rows, _CONTEXT, varied=True), candidates, options.passes, options.load):
                print(line, flush=True)
            write_table()
            print(f"   {time.monotonic() - start:.0f} s", flush=True)
        del model


def make_model(name: str, format: FormatId | None) -> Model:
    """Make a few layers of a bundled model. Experts, which have no configs here, are small and add nothing: which ones
    are chosen depends on the order of sums."""
    spec = read_spec(_CONFIGS / name)
    layer = spec.layers[0]
    if isinstance(layer.mlp, MoeMlp):
        layer = dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, size=_EXPERT_SIZE))
    model = Model(dataclasses.replace(spec, layers=(layer,) * _LAYERS))
    for layer in model.layers:
        if isinstance(layer.mlp, MoeWeights):
            plain(layer.mlp.down).zero_()
    if format:
        layers = [pack_layer(layer, format) for layer in model.layers]
        lm_head = model.lm_head if format is FormatId.INT4 else pack_weight(model.lm_head, format)
        model.decoder = Decoder(model.spec, model.embedding, layers, model.norm, lm_head)
    return model


def pack_layer(layer: LayerWeights, format: FormatId) -> LayerWeights:
    mlp = layer.mlp
    if isinstance(mlp, DenseWeights):
        mlp = DenseWeights(pack_weight(mlp.gate_up, format), pack_weight(mlp.down, format))
    qkv, output = pack_weight(layer.qkv, format), pack_weight(layer.output, format)
    return dataclasses.replace(layer, qkv=qkv, output=output, mlp=mlp)


def pack_weight(weight: Weight, format: FormatId) -> PackedWeight:
    return pack([quantize_fp8(plain(weight)) if format is FormatId.FP8 else quantize_int4(plain(weight))])


def quantize_int4(weight: Tensor) -> QuantizedMatrix:
    """Round to 4 bits, with a scale and zero point for each group."""
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=2)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp_(0, 15)
    return QuantizedMatrix(codes.view(weight.shape).to(torch.uint8), scales, zeros.to(torch.uint8))


def write_table() -> None:
    tables = json.loads(tile_configs.TABLE.read_text()) if tile_configs.TABLE.exists() else {}
    tables[torch.cuda.get_device_name()] = {"gpu": tile_configs.describe_gpu(), "configs": tile_configs.read_table()}
    tile_configs.TABLE.write_text(
        "{\n " + ",\n ".join(itertools.starmap(format_table, sorted(tables.items()))) + "\n}\n"
    )


def format_table(device: str, table: dict[str, Any]) -> str:
    """Return a GPU's part of the table, each tile config a line."""
    lines = (f"   {json.dumps(key)}: {json.dumps(config)}" for key, config in sorted(table["configs"].items()))
    inner = f'  "gpu": {json.dumps(table["gpu"])},\n  "configs": {{\n' + ",\n".join(lines) + "\n  }"
    return f"{json.dumps(device)}: {{\n{inner}\n }}"


if __name__ == "__main__":
    with torch.inference_mode():
        main()
