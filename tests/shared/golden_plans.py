# SPDX-License-Identifier: Apache-2.0
"""The execution plans of some models on an H100, as text: recorded in tests/unit/plans.

gpt-oss has its experts in one tensor, in MXFP4 or in 16 bits: its plans in FP8 and in 4 bits are those of its other
matrices. `blink quantize` refuses it; its plan in 4 bits is for a checkpoint from elsewhere.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import blink.models
from blink.config import EngineConfig
from blink.engine.plans import list_buckets
from blink.formats.schemes import Quantization
from blink.kernels.gpu.device import supposing
from blink.models.weights.source import read_spec
from blink.runner.gpu_device import GpuDevice
from blink.runner.planner import plan_model
from blink.runner.sites import expected_sites

RECORDED = Path(__file__).parents[1] / "unit" / "plans"
_CONFIGS = (Path(blink.models.__path__[0]) / "configs", Path(__file__).parents[2] / "benchmarks" / "configs")
_SCHEMES = {
    "bf16": None,
    "fp8": Quantization("fp8", has_groups=False),
    "fp8-block": Quantization("fp8"),
    "int4": Quantization("awq"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model in a number format."""

    config: str
    format: str  # of _SCHEMES, or as the config says
    ranks: int = 1

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{self.config}-{self.format}" + (f"-tp{self.ranks}" if self.ranks > 1 else "")


CASES = [
    *itertools.starmap(
        Case, itertools.product(("llama-3-8b", "phi-4", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-20b"), _SCHEMES)
    ),
    Case("gpt-oss-20b", "mxfp4"),
    Case("glm-4.7-flash", "bf16"),
    Case("glm-4.7-flash", "fp8"),
    Case("llama-3-8b", "bf16", 2),
    Case("llama-3-8b", "fp8", 2),
    Case("qwen3-30b-a3b", "fp8-block", 4),
    Case("qwen3-235b-a22b", "fp8-block", 8),
]


def show_plan(case: Case) -> str:
    """Return the plan of a model for all sizes of step of an engine with default options."""
    spec = read_spec(next(path for folder in _CONFIGS if (path := folder / case.config).is_dir()))
    if case.format in _SCHEMES:
        spec = replace(spec, quantization=_SCHEMES[case.format])
    if case.ranks > 1:
        spec = spec.split(case.ranks, spec.scaled_columns)[0]
    config = EngineConfig()
    with supposing("h100"):
        return plan_model(GpuDevice(), expected_sites(spec, config.block_size), list_buckets(config)).show()


def main() -> None:
    """Record all."""
    RECORDED.mkdir(exist_ok=True)
    for case in CASES:
        (RECORDED / f"{case.name}.txt").write_text(show_plan(case))


if __name__ == "__main__":
    main()
