# SPDX-License-Identifier: Apache-2.0
"""The options of LoRA adapters, which engine and frontends share."""

from __future__ import annotations

import os
from dataclasses import dataclass

from blink.errors import ConfigError
from blink.option import option, require

UPDATING_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters on the served model."""

    enable_lora: bool = option(False, "serve LoRA adapters")
    max_loras: int = option(1, "adapters that run at once")
    max_lora_rank: int = option(16, "largest rank of an adapter", choices=MAX_LORA_RANKS)
    max_cpu_loras: int = option(0, "adapters in the host's memory; 0: as many as run at once")

    def __post_init__(self) -> None:
        require(self, "max_loras", 1, 1024)
        require(self, "max_cpu_loras", 0, 1024)

    @property
    def num_adapters(self) -> int:
        """How many adapters the host's memory holds; 0: none are served.

        Raises:
            ConfigError: it is to hold fewer than run at once.
        """
        if self.enable_lora and 0 < self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"--max-cpu-loras ({self.max_cpu_loras}) must be at least --max-loras ({self.max_loras})")
        return (self.max_cpu_loras or self.max_loras) if self.enable_lora else 0

    def check_workers(self, num_workers: int, num_engines: int, *, updates: bool) -> None:
        """Refuse what does not go with several workers or engines; updates: whether clients may load and unload.

        Raises:
            ConfigError: adapters would be known to one of them alone.
        """
        if not self.enable_lora:
            return
        if num_workers > 1 and updates:
            told = "--allow-runtime-lora-updating changes one frontend: it does not go with --frontend-workers"
            raise ConfigError(told)
        if num_engines > 1:
            raise ConfigError("--enable-lora does not go with --data-parallel-size yet")

    @property
    def sizes(self) -> dict[str, int]:
        """The fields of a geometry."""
        return {"num_adapters": self.num_adapters, "num_adapter_slots": self.max_loras if self.enable_lora else 0}


def allows_updating(flag: bool) -> bool:
    """Say whether clients may load and unload adapters: by the flag, or by vLLM's variable."""
    return flag or os.environ.get(UPDATING_VARIABLE, "").lower() in ("1", "true")
