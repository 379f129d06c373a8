# SPDX-License-Identifier: Apache-2.0
"""Read the quantization_config of a config.json and refuse, by name, what Blink does not run. Needs no torch."""

from __future__ import annotations

from blink.models.quantization import Quantization
from blink.models.weights.fields import Fields, show

_KNOWN = "Blink runs fp8, compressed-tensors (FP8, 4 bits), awq, gptq and mxfp4"
_GROUP = 128


def read_quantization(config: Fields) -> Quantization | None:
    """Return how the checkpoint is quantized; None if it is not.

    Raises:
        ConfigError: in a way that Blink does not run.
    """
    if not config.has("quantization_config"):
        return None
    place = f"{config.place}: quantization_config"
    values = Fields(config.mapping("quantization_config"), place)
    method = values.text("quant_method")
    readers = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed,
        "awq": _read_awq,
        "gptq": _read_gptq,
        "mxfp4": lambda _: Quantization("mxfp4"),
    }
    values.require(method in readers, f"quantization by {show(method)} ({_KNOWN})")
    return readers[method](values)


def _read_fp8(values: Fields) -> Quantization:
    values.require(values.text("fmt", "e4m3") == "e4m3", f"FP8 of the format {show(values.text('fmt', 'e4m3'))}")
    blocks = values.integers("weight_block_size", [])
    values.require(blocks in ([], [_GROUP, _GROUP]), f"FP8 in blocks of {blocks}, not 128 x 128,")
    return Quantization("fp8", has_groups=bool(blocks))


def _read_awq(values: Fields) -> Quantization:
    _check_int4(values)
    version = values.text("version", "gemm").lower()
    values.require(version == "gemm", f"AWQ of the version {show(version)}")
    values.require(values.flag("zero_point", True), "AWQ without zero points")
    return Quantization("awq")


def _read_gptq(values: Fields) -> Quantization:
    _check_int4(values)
    values.require(not values.flag("desc_act"), "GPTQ with desc_act (columns in another order)")
    # Files of the first version store zero points less 1.
    form = values.text("checkpoint_format", "gptq")
    values.require(form in ("gptq", "gptq_v2"), f"GPTQ of the checkpoint format {show(form)}")
    return Quantization("gptq", zero_offset=1 if form == "gptq" else 0)


def _check_int4(values: Fields) -> None:
    bits, group = values.integer("bits", 4), values.integer("group_size", _GROUP, low=-1)
    values.require(bits == 4, f"{values.text('quant_method')} of {bits} bits, not 4,")
    _check_group(values, group)


def _check_group(values: Fields, group: int) -> None:
    values.require(group == _GROUP, f"a group_size of {group}, not {_GROUP},")


def _read_compressed(values: Fields) -> Quantization:
    groups = values.mapping("config_groups")
    values.require(len(groups) == 1, f"compressed-tensors with {len(groups)} config_groups, not one,")
    scheme = Fields(Fields(groups, values.place).mapping(next(iter(groups))), f"{values.place}.config_groups")
    weights = Fields(scheme.mapping("weights"), f"{scheme.place}.weights")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits")
    strategy = weights.text("strategy", "tensor")
    form = values.text("format", "")
    if kind == "float" and bits == 8 and form in ("float-quantized", "naive-quantized", ""):
        weights.require(strategy in ("tensor", "channel", "block"), f"FP8 by {show(strategy)}")
        if strategy == "block":
            blocks = weights.integers("block_structure")
            weights.require(blocks == [_GROUP, _GROUP], f"FP8 in blocks of {blocks}, not 128 x 128,")
        return Quantization("fp8", has_groups=strategy == "block")
    is_packed = kind == "int" and bits == 4 and form == "pack-quantized"
    weights.require(is_packed, f"compressed-tensors with {show(kind)} weights of {bits} bits ({show(form)}; {_KNOWN})")
    scheme.require(not scheme.has("input_activations"), "4 bits with quantized activations")
    weights.require(strategy == "group", f"4 bits by {show(strategy)}")
    weights.require(weights.text("actorder", "") in ("", "weight", "static"), "4 bits with actorder group")
    _check_group(weights, weights.integer("group_size", low=-1))
    return Quantization("packed")
