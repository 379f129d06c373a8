# SPDX-License-Identifier: Apache-2.0
"""The engines of one `blink serve`: what each is told, and its process. With --data-parallel-size they share a port."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from blink.cli.flags import to_flags
from blink.cli.health import EngineHealth
from blink.cli.supervision import Child
from blink.config import EngineConfig, ServeConfig
from blink.errors import ConfigError
from blink.host.nvml import count_gpus
from blink.region.files import engine_regions, region_path
from blink.region.outside import HASH_KEY_VARIABLE

_HEARTBEAT_TIMEOUT: Final = 10.0  # seconds without a heartbeat after which an engine is ended
_GPUS = "CUDA_VISIBLE_DEVICES"


class EngineChild(Child):
    """One engine's process, and the region by which it is seen from outside."""

    def __init__(self, name: str, config: EngineConfig, environment: Mapping[str, str]) -> None:
        super().__init__(name, [sys.executable, "-m", "blink", "engine", *to_flags(config)], environment)
        self.region = region_path(config.region)
        self._health = EngineHealth(config.region, _HEARTBEAT_TIMEOUT)

    @property
    def has_booted(self) -> bool:
        """Whether it has got as far as to have a region, since it started."""
        return self._health.was_seen or self.region.exists()

    @property
    def serves(self) -> bool:
        """Whether it runs and has a region."""
        return self.is_running and self.region.exists()

    def start(self) -> None:
        """Start the process; nothing is claimed of its region before that is there."""
        self._health.reset()
        super().start()

    def fault(self, now: float) -> str | None:
        """Say at `now` (monotonic seconds) why it cannot serve any more; None while it can, boots or does not run."""
        return self._health.fault(now, self.hindrance()) if self.is_running else None


def start_engines(config: ServeConfig) -> list[EngineChild]:
    """Return the processes of a server's engines, not started.

    Raises:
        ConfigError: there are fewer GPUs than engines.
    """
    configs = replica_configs(config)
    if len(configs) == 1:
        return [EngineChild("the engine", configs[0], {})]
    key, gpus = secrets.token_hex(16), deal_gpus(config.engine.device, len(configs))
    environments = [{HASH_KEY_VARIABLE: key, **({_GPUS: gpu} if gpu else {})} for gpu in gpus]
    return [EngineChild(f"engine {index}", *each) for index, each in enumerate(zip(configs, environments, strict=True))]


def replica_configs(config: ServeConfig) -> list[EngineConfig]:
    """Return what each engine is told: all the same but its region; CPU engines share the cores."""
    count = config.frontend.data_parallel_size
    engine = config.engine
    if count > 1 and not engine.cpu_threads and "OMP_NUM_THREADS" not in os.environ:
        engine = replace(engine, cpu_threads=max(1, len(os.sched_getaffinity(0)) // count))
    return [replace(engine, region=region) for region in engine_regions(engine.region, count)]


def deal_gpus(device: str, count: int) -> list[str]:
    """Return the GPU of each engine as CUDA_VISIBLE_DEVICES has it; "" where engines run on the CPU.

    Raises:
        ConfigError: there are fewer than engines.
    """
    visible = os.environ.get(_GPUS)
    gpus = [*map(str, range(count_gpus()))] if visible is None else [each for each in visible.split(",") if each]
    if device == "cpu" or (device == "auto" and not gpus):
        return [""] * count
    if len(gpus) < count:
        raise ConfigError(f"--data-parallel-size {count} needs as many GPUs, one for each engine; here: {len(gpus)}")
    return gpus[:count]
