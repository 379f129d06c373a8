# SPDX-License-Identifier: Apache-2.0
"""Tells all readers of a region what the engine's GPU has used: the engine's host process alone writes it there.

A frontend may run where there is no GPU, and a stopped engine process stops no request: the figures then stand still.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from blink.errors import BlinkError
from blink.host.nvml import Gpu
from blink.region.memory import Region

logger = logging.getLogger("blink.engine")

_INTERVAL: Final = 5.0  # seconds between two looks, each of which takes the driver some milliseconds
_WINDOW: Final = 60.0  # seconds over which joules per token are a mean


class EnergyReport:
    """Write a GPU's joules into the control block, and those per generated token of the last minute.

    Raises:
        BlinkError: the GPU's energy cannot be read.
    """

    def __init__(self, region: Region, gpu: Gpu) -> None:
        self._region = region
        self._gpu: Gpu | None = gpu
        self._first = gpu.read_joules()
        self._past: deque[tuple[float, float, int]] = deque()  # seconds, joules, generated tokens

    def look(self, now: float) -> None:
        """Write what is true at `now` (seconds), every few seconds; call it now and then."""
        if self._gpu is None or (self._past and now - self._past[-1][0] < _INTERVAL):
            return
        try:
            joules = self._gpu.read_joules() - self._first
        except BlinkError as error:
            logger.warning("energy is no longer counted: %s", error)
            self._gpu = None
            self._write(0, 0)
            return
        tokens = int(self._region.control["statistics"]["generation_tokens"])
        self._past.append((now, joules, tokens))
        while len(self._past) > 1 and now - self._past[1][0] >= _WINDOW:
            self._past.popleft()
        _, joules_before, tokens_before = self._past[0]
        grown = tokens - tokens_before
        self._write(max(1, round(joules * 1e3)), round((joules - joules_before) * 1e6 / grown) if grown else 0)

    def _write(self, energy_mj: int, token_energy_uj: int) -> None:
        self._region.store_control("energy_mj", energy_mj)
        self._region.store_control("token_energy_uj", token_energy_uj)


def report_energy(region: Region, bus_id: str) -> EnergyReport | None:
    """Return what reports the energy of the GPU at a PCI bus id; None, and a line in the log, where none is counted."""
    try:
        return EnergyReport(region, Gpu(bus_id=bus_id))
    except BlinkError as error:
        logger.info("no energy is counted: %s", error)
        return None
