# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of itself, for those who only look: its region is read and never mapped or written.

A file may be truncated at any time, and touching a mapping of it would then be fatal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from blink.errors import BlinkError, ConfigError, EngineUnavailableError
from blink.region.files import SHM, is_served, open_own, region_path, server_region
from blink.region.layout import CONSTANTS, CONTROL, HEADER, TRACE_ENTRY, EngineState
from blink.region.memory import check_file
from blink.region.step_tokens import STATS

_PREFIX = "blink-"
_SERVING = (EngineState.READY, EngineState.PAUSED, EngineState.DRAINING, EngineState.DRAINED)


def engine_stats(control: Any, geometry: Any) -> dict[str, int]:
    """Return the counters and gauges of a control block, and what gives them a scale."""
    statistics = control["statistics"]
    found: dict[str, int] = dict(zip(statistics.dtype.names, statistics.item(), strict=True))
    accepted: Any = found.pop("accepted_at")
    found |= {f"accepted_at_{place}": int(count) for place, count in enumerate(accepted)}
    found |= {name: int(control[name]) for name in ("heartbeat", "absent", "energy_mj", "token_energy_uj")}
    found |= zip(STATS, control["step_tokens"].tolist(), strict=True)
    found["block_size"], found["prefix_caching"] = int(geometry["block_size"]), int(geometry["prefix_caching"])
    return found


class RegionReport:
    """The region of a running engine, as a file that is read."""

    def __init__(self, name: str) -> None:
        """Open the region.

        Raises:
            EngineUnavailableError: no engine has it.
            LayoutMismatchError: the engine is of another build.
            ConfigError: its file is somebody else's.
        """
        self.name = name
        path = region_path(name)
        try:
            self._fd = open_own(path, os.O_RDONLY)
        except FileNotFoundError:
            raise EngineUnavailableError(f"no engine serves the region {name!r}") from None
        try:
            check_file(self._fd, path)
        except BlinkError:
            os.close(self._fd)
            raise
        self.header = self._read(HEADER, 0)[0]
        self.geometry: Any = self.header["geometry"]

    @property
    def model(self) -> str:
        """Name of the model."""
        return bytes(self.header["model"]).decode()

    def control(self) -> Any:
        """Read the control block (dtype layout.CONTROL)."""
        return self._read(CONTROL, CONSTANTS["control_offset"])[0]

    def stats(self) -> Mapping[str, int]:
        """Return the engine's counters and gauges; none if it does not serve any more."""
        control = self.control()
        is_up = control["state"] in _SERVING
        return engine_stats(control, self.geometry) if is_up else {}

    def trace(self) -> npt.NDArray[np.void]:
        """Read the last steps, oldest first (dtype layout.TRACE_ENTRY), as many as the ring holds whole."""
        count = int(self.geometry["trace_entries"])
        offset = int(self.header["trace_offset"])
        entries = self._read(TRACE_ENTRY, offset, count)
        newest = int(self._read(TRACE_ENTRY, offset, count)["step"].max())
        # What may have been overwritten while it was read is left out.
        whole = (entries["step"] > max(0, newest + 2 - count)) & (entries["step"] % count == np.arange(count))
        return np.sort(entries[whole], order="step")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _read(self, dtype: np.dtype[Any], offset: int, count: int = 1) -> npt.NDArray[np.void]:
        data = os.pread(self._fd, dtype.itemsize * count, offset)
        if len(data) < dtype.itemsize * count:
            raise EngineUnavailableError(f"the memory of the region {self.name!r} was truncated")
        return np.frombuffer(data, dtype).copy()


def served_regions() -> list[str]:
    """List the regions of this user that a live engine serves on this machine."""
    found: list[str] = []
    for path in sorted(SHM.glob(f"{_PREFIX}*")):
        if "~" in path.name:
            continue
        try:
            fd = open_own(path, os.O_RDONLY)
        except (FileNotFoundError, ConfigError):
            continue
        if is_served(fd):
            found.append(path.name.removeprefix(_PREFIX))
        os.close(fd)
    return found


def only_server(otherwise: str = "") -> str:
    """Return the region of the one server on this machine, which may have several engines; raises as only_region()."""
    servers = {*map(server_region, served_regions())}
    return servers.pop() if len(servers) == 1 else only_region(otherwise)


def only_region(otherwise: str = "") -> str:
    """Return the one region that is served on this machine; `otherwise` says what else a user may do.

    Raises:
        ConfigError: there is none, or more than one.
    """
    match served_regions():
        case [name]:
            return name
        case []:
            raise ConfigError(f"no engine of this user runs on this machine: start one with `blink serve`{otherwise}")
        case names:
            raise ConfigError(f"several engines run on this machine, choose one with --region: {', '.join(names)}")
