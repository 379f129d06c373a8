# SPDX-License-Identifier: Apache-2.0
"""What GEMMs of a CPU engine may round, by --cpu-gemm and --cpu-prompt-gemm."""

from __future__ import annotations

from blink.config import EngineConfig
from blink.errors import ConfigError
from blink.kernels.cpu.gguf_weight import Bf16Isa, Int16Isa
from blink.kernels.rounding import Rounding


def find_rounding(config: EngineConfig) -> Rounding:
    """Return what GEMMs may round."""
    return Rounding(activations=config.cpu_gemm == "int16", prompts=config.cpu_prompt_gemm == "bfloat16")


def check_rounding(config: EngineConfig) -> None:
    """Refuse, with a `ConfigError`, rounding that the processor has no use for."""
    rounding = find_rounding(config)
    if rounding.activations and not Int16Isa.BEST.is_here:
        raise ConfigError("--cpu-gemm int16 needs a processor with AVX-512 VNNI: leave it out")
    if rounding.prompts and not Bf16Isa.BEST.is_here:
        raise ConfigError("--cpu-prompt-gemm bfloat16 needs a processor with AMX: leave it out")
