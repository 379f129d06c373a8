# SPDX-License-Identifier: Apache-2.0
"""Number formats by name, and what a config.json says of a checkpoint's. Needs no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from blink.fields import Fields, show

GROUP = 128  # columns that share a scale in what a GPU's kernels read
GGUF_UNIT = 64  # columns of a row that lie together in formats/gguf.py's arrays
ARRAY_GROUP = 32  # columns that share a scale in int4_arrays.py's
UNIT_BYTES = 128  # csrc/kernels/common/quantized.cuh says what lies where in a unit of a row
_WORD_BYTES = 4  # of a group's scales and zero point, as a GPU keeps them; MXFP4's four scales have a byte each


class FormatId(Enum):
    """A format of single numbers; whether a row or a group of columns shares a scale is another matter."""

    BF16 = "bf16", 16
    FP8 = "fp8", 8  # e4m3
    INT4 = "int4", 4  # whole numbers from 0 to 15, less a zero point
    MXFP4 = "mxfp4", 4  # e2m1
    Q4_0 = "Q4_0", 4, 2
    Q4_1 = "Q4_1", 4, 3
    Q8_0 = "Q8_0", 8, 8
    Q4_K = "Q4_K", 4, 12
    Q5_K = "Q5_K", 5, 13
    Q6_K = "Q6_K", 6, 14

    def __init__(self, tag: str, bits: int, ggml: int = -1) -> None:
        self.tag = tag  # for the Triton kernels
        self.bits = bits  # of a number
        self.ggml = ggml  # in GGUF files: gguf.GGMLQuantizationType

    @classmethod
    def of_ggml(cls, number: int) -> FormatId:
        """Return the format with ggml's number.

        Raises:
            KeyError: there is none.
        """
        return {one.ggml: one for one in cls if one.ggml >= 0}[number]

    @property
    def cpp(self) -> str:
        """The format in the names of kernels, where csrc/kernels/formats.h has it."""
        return f"blink::FormatId::k{self.tag.capitalize()}"

    @property
    def unit(self) -> int:
        """Columns of a unit; a packed row has a whole number of them."""
        return UNIT_BYTES * 8 // self.bits


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a weight is kept: numbers of a format, and what shares a scale. Kernels say which of them they take."""

    format: FormatId
    grouped: bool = False  # columns of a row share one by the GROUP; else each row has one, or none is needed

    @property
    def cpp(self) -> str:
        """The encoding in the names of kernels."""
        return f"{self.format.cpp}, {str(self.grouped).lower()}"


BF16 = Encoding(FormatId.BF16)
FP8_ROW, FP8_BLOCK = Encoding(FormatId.FP8), Encoding(FormatId.FP8, grouped=True)
INT4 = Encoding(FormatId.INT4, grouped=True)

# Bytes of what formats/gguf.py makes of a block, by ggml's numbers: K-quants get whole bytes for scales of 6 bits, and
# words for those of 16; other blocks stay as large as they are.
PLANAR_BLOCK_BYTES: Mapping[int, int] = {FormatId.Q4_K.ggml: 148, FormatId.Q5_K.ggml: 180, FormatId.Q6_K.ggml: 212}
GGUF_ON_GPU = frozenset(one.ggml for one in FormatId if one.ggml >= 0)  # of what a GPU multiplies with as it is


@dataclass(frozen=True, slots=True)
class Stored:
    """What is known of a storage: how matrices lie in a checkpoint's files. The format's module reads them."""

    format: FormatId
    title: str
    experts_only: bool = False  # whether all other matrices have 16 bits


STORED: Mapping[str, Stored] = {
    "fp8": Stored(FormatId.FP8, "FP8"),
    "awq": Stored(FormatId.INT4, "4 bits (AWQ)"),
    "gptq": Stored(FormatId.INT4, "4 bits (GPTQ)"),
    "packed": Stored(FormatId.INT4, "4 bits (compressed-tensors)"),  # its words of 4 bits
    "mxfp4": Stored(FormatId.MXFP4, "4 bits (MXFP4)", experts_only=True),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a config says of the quantized matrices; which these are, the files show."""

    storage: str  # one of STORED
    zero_offset: int = 0  # of 4 bits: what is to be added to a stored zero point
    has_groups: bool = True  # columns of a row share scales by the group; else each row has one
    group: int = GROUP  # columns of a group; MXFP4's are a part of it
    output: Quantization | None = None  # of the output layer, where it is not tied; None: it has 16 bits

    @property
    def format(self) -> FormatId:
        """The format of the matrices' numbers."""
        return STORED[self.storage].format

    @property
    def encoding(self) -> Encoding:
        """How a GPU keeps the matrices, where they can stay."""
        return Encoding(self.format, self.has_groups)

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return self.format.bits

    @property
    def experts_only(self) -> bool:
        """Tell whether all other matrices have 16 bits."""
        return STORED[self.storage].experts_only

    @property
    def in_arrays(self) -> bool:
        """Tell whether a GPU keeps such matrices in a GGUF format's arrays, whose groups are smaller."""
        return self.group != GROUP

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight that a GPU reads, with its part of the scales."""
        if self.in_arrays:
            return self.bits / 8 + _WORD_BYTES / ARRAY_GROUP
        return self.bits / 8 + (_WORD_BYTES / GROUP if self.has_groups else 0)

    @property
    def kept_bytes(self) -> float:
        """Bytes of a weight in a GPU's memory, but of experts: the groups' scales of FP8 lie there in two orders."""
        has_both = self.encoding == FP8_BLOCK
        return self.weight_bytes + (_WORD_BYTES / GROUP if has_both else 0)

    @property
    def title(self) -> str:
        """The scheme in words."""
        title = STORED[self.storage].title
        if self.format is not FormatId.FP8:
            return title
        return f"{title} in blocks" if self.has_groups else f"{title} per channel"


FP8_ROWS = Quantization("fp8", has_groups=False)  # what --quantization fp8 makes

_KNOWN = "Blink runs fp8, compressed-tensors (FP8, 4 bits), awq, gptq and mxfp4"
_INT4_GROUPS = (32, 64, GROUP)
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
    values.require(method in _READERS, f"quantization by {show(method)} ({_KNOWN})")
    return _READERS[method](values)


def _read_fp8(values: Fields) -> Quantization:
    values.require(values.text("fmt", "e4m3") == "e4m3", f"FP8 of the format {show(values.text('fmt', 'e4m3'))}")
    blocks = values.integers("weight_block_size", [])
    values.require(blocks in ([], [GROUP, GROUP]), f"FP8 in blocks of {blocks}, not 128 x 128,")
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
    return _check_group(values, values.integer("group_size", GROUP, low=-1))


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
        others = [one for one in found if one != FP8_ROWS]
        is_known = len(found) == 2 and [one.format for one in others] == [FormatId.INT4]
        values.require(is_known, "a mix other than FP8 per channel and 4 bits")
    main = next((one for one in found if one.format is FormatId.INT4), found[0])
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
            weights.require(blocks == [GROUP, GROUP], f"FP8 in blocks of {blocks}, not 128 x 128,")
        return Quantization("fp8", has_groups=strategy == "block")
    is_packed = kind == "int" and bits == 4 and form == "pack-quantized"
    weights.require(is_packed, f"compressed-tensors with {show(kind)} weights of {bits} bits ({show(form)}; {_KNOWN})")
    scheme.require(not scheme.has("input_activations"), "4 bits with quantized activations")
    weights.require(strategy == "group", f"4 bits by {show(strategy)}")
    weights.require(weights.text("actorder", "") in ("", "weight", "static"), "4 bits with actorder group")
    return Quantization("packed", group=_check_group(weights, weights.integer("group_size", low=-1)))


def describe_group(scheme: Quantization) -> dict[str, Any]:
    """Return one of compressed-tensors' config_groups, which _read_scheme() reads: of rows in FP8, or of 4 bits."""
    activations: dict[str, Any] | None = None
    if scheme.encoding == FP8_ROW:
        form = "float-quantized"
        weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    else:
        assert scheme.encoding == INT4
        form = "pack-quantized"
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": scheme.group, "symmetric": False}
    return {
        "targets": ["Linear"],
        "format": form,
        "weights": weights | {"dynamic": False},
        "input_activations": activations,
        "output_activations": None,
    }


_READERS: Mapping[str, Callable[[Fields], Quantization]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": lambda _: Quantization("mxfp4"),
}
