# SPDX-License-Identifier: Apache-2.0
"""The options of `blink quantize`: a frozen dataclass whose fields become flags."""

from __future__ import annotations

from dataclasses import dataclass

from blink.config import option, require
from blink.errors import ConfigError

GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """How to round, and by which text."""

    format: str = option(
        "fp8",
        "fp8: e4m3, each row with a scale; int4: 4 bits, groups of columns with a scale and a zero point",
        choices=("fp8", "int4"),
    )
    calibration: str = option(
        "", "text (UTF-8) like the model's later input and output; empty: one of Blink's", metavar="FILE"
    )
    num_calibration_tokens: int = option(16384, "tokens of it to use at most: more cost time and memory")
    group_size: int = option(
        0,
        "columns of a group with int4; 0: 128, or the largest that all matrices have whole",
        choices=(0, *GROUP_SIZES),
    )
    fp8_matrices: tuple[str, ...] = option(
        (), "ends of names of matrices that get FP8 where the others get int4, such as qkv_proj (repeatable)",
        flag="fp8_matrix", metavar="NAME",
    )  # fmt: skip
    quantize_lm_head: bool = option(
        False, "the output layer gets FP8 too, with int4 as well; one that is tied to the embeddings becomes its own"
    )
    tune: int = option(
        0,
        "with int4: steps of training towards the original model's predictions, on texts that it writes; on a GPU"
        " if there is one",
        metavar="STEPS",
    )

    def __post_init__(self) -> None:
        require(self, "num_calibration_tokens", 128, 1 << 20)
        require(self, "tune", 0, 1 << 20)
        if self.tune and self.format != "int4":
            raise ConfigError("--tune is for --format int4.")
        if self.fp8_matrices and self.format != "int4":
            raise ConfigError("--fp8-matrix is for --format int4: with fp8 all matrices have 8 bits.")
