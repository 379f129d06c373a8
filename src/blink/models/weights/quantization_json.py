# SPDX-License-Identifier: Apache-2.0
"""Read the quantization_config of a config.json and refuse, by name, what Blink does not run. Needs no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from blink.models.fields import Fields, show
from blink.models.quantization import PACKED_GROUP, Quantization

_KNOWN = "Blink runs fp8, compressed-tensors (FP8, 4 bits), awq, gptq and mxfp4"
_INT4_GROUPS = (32, 64, PACKED_GROUP)
_OUTPUT = "lm_head"


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
    values.require(blocks in ([], [PACKED_GROUP, PACKED_GROUP]), f"FP8 in blocks of {blocks}, not 128 x 128,")
    return Quantization("fp8", has_groups=bool(blocks))


def _read_awq(values: Fields) -> Quantization:
    group = _read_int4_group(values)
    version = values.text("version", "gemm").lower()
    values.require(version == "gemm", f"AWQ of the version {show(version)}")
    values.require(values.flag("zero_point", True), "AWQ without zero points")
    return Quantization("awq", group=group)


def _read_gptq(values: Fields) -> Quantization:
    group = _read_int4_group(values)
    values.require(not values.flag("desc_act"), "GPTQ with desc_act (columns in another order)")
    # Files of the first version store zero points less 1.
    form = values.text("checkpoint_format", "gptq")
    values.require(form in ("gptq", "gptq_v2"), f"GPTQ of the checkpoint format {show(form)}")
    found = Quantization("gptq", zero_offset=1 if form == "gptq" else 0, group=group)
    return dataclasses.replace(found, output=found) if values.flag("lm_head") else found


def _read_int4_group(values: Fields) -> int:
    bits = values.integer("bits", 4)
    values.require(bits == 4, f"{values.text('quant_method')} of {bits} bits, not 4,")
    return _check_group(values, values.integer("group_size", PACKED_GROUP, low=-1))


def _check_group(values: Fields, group: int) -> int:
    values.require(group in _INT4_GROUPS, f"a group_size of {group}, not {' or '.join(map(str, _INT4_GROUPS))},")
    return group


def _read_compressed(values: Fields) -> Quantization:
    groups = values.mapping("config_groups")
    form = values.text("format", "")
    is_mixed = form == "mixed-precision"
    if not is_mixed:
        values.require(len(groups) == 1, f"compressed-tensors with {len(groups)} config_groups, not one,")
    parts = [_find_group(values, groups, name) for name in groups]
    found = [_read_scheme(part, "" if is_mixed else form) for part in parts]
    if is_mixed:
        kinds = sorted((one.storage, one.storage == "fp8" and one.has_groups) for one in found)
        values.require(kinds == [("fp8", False), ("packed", False)], "a mix other than FP8 per channel and 4 bits")
    main = next((one for one in found if one.storage == "packed"), found[0])
    return dataclasses.replace(main, output=_find_output(values, dict(zip(found, parts, strict=True))))


def _find_group(values: Fields, groups: Mapping[str, Any], name: str) -> Fields:
    return Fields(Fields(groups, values.place).mapping(name), f"{values.place}.config_groups")


def _find_output(values: Fields, groups: Mapping[Quantization, Fields]) -> Quantization | None:
    """Return the scheme of the group that the output layer belongs to; None: to none of them."""
    if any(map(_names_output, values.texts("ignore", []))):
        return None
    targets = {scheme: group.texts("targets", []) for scheme, group in groups.items()}
    named = (scheme for scheme, some in targets.items() if any(map(_names_output, some)))
    return next(named, None) or next((scheme for scheme, some in targets.items() if "Linear" in some), None)


def _names_output(entry: str) -> bool:
    """Tell whether an entry, a layer's name or "re:" and a pattern of names, means the output layer."""
    if not entry.startswith("re:"):
        return entry.rpartition(".")[2] == _OUTPUT
    try:
        return re.match(entry.removeprefix("re:"), _OUTPUT) is not None
    except (re.error, RecursionError, OverflowError):  # what a stranger's file may hold
        return False


def _read_scheme(scheme: Fields, form: str) -> Quantization:
    """Read one of the config_groups; form: the format of all, where each has none of its own."""
    weights = Fields(scheme.mapping("weights"), f"{scheme.place}.weights")
    form = scheme.text("format", form)
    kind, bits = weights.text("type", "int"), weights.integer("num_bits")
    strategy = weights.text("strategy", "tensor")
    if kind == "float" and bits == 8 and form in ("float-quantized", "naive-quantized", ""):
        weights.require(strategy in ("tensor", "channel", "block"), f"FP8 by {show(strategy)}")
        if strategy == "block":
            blocks = weights.integers("block_structure")
            weights.require(blocks == [PACKED_GROUP, PACKED_GROUP], f"FP8 in blocks of {blocks}, not 128 x 128,")
        return Quantization("fp8", has_groups=strategy == "block")
    is_packed = kind == "int" and bits == 4 and form == "pack-quantized"
    weights.require(is_packed, f"compressed-tensors with {show(kind)} weights of {bits} bits ({show(form)}; {_KNOWN})")
    scheme.require(not scheme.has("input_activations"), "4 bits with quantized activations")
    weights.require(strategy == "group", f"4 bits by {show(strategy)}")
    weights.require(weights.text("actorder", "") in ("", "weight", "static"), "4 bits with actorder group")
    return Quantization("packed", group=_check_group(weights, weights.integer("group_size", low=-1)))
