# SPDX-License-Identifier: Apache-2.0
"""What GEMMs of a CPU engine may round, by --cpu-gemm and --cpu-prompt-gemm."""

from __future__ import annotations

from blink.config import EngineConfig
from blink.engine.determinism import is_deterministic
from blink.errors import ConfigError
from blink.kernels.cpu.gguf_weight import Bf16Isa, Int16Isa
from blink.kernels.rounding import Rounding


def find_rounding(config: EngineConfig) -> Rounding:
    """Return what GEMMs may round: by default activations to 16 bits, which is finer than the KV cache's float16."""
    compares_bits = is_deterministic(config) or config.has_ranks
    usual = "float32" if compares_bits or not Int16Isa.BEST.is_here else "int16"
    chosen = usual if config.cpu_gemm == "auto" else config.cpu_gemm
    return Rounding(activations=chosen == "int16", prompts=config.cpu_prompt_gemm == "bfloat16")


def check_rounding(config: EngineConfig) -> None:
    """Refuse, with a `ConfigError`, rounding that the processor has no use for."""
    rounding = find_rounding(config)
    if rounding.activations and not Int16Isa.BEST.is_here:
        raise ConfigError("--cpu-gemm int16 needs a processor with AVX-512 VNNI: leave it out")
    if rounding.prompts and not Bf16Isa.BEST.is_here:
        raise ConfigError("--cpu-prompt-gemm bfloat16 needs a processor with AMX: leave it out")
