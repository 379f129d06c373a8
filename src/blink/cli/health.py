# SPDX-License-Identifier: Apache-2.0
"""How the supervisor sees that its engine lives though no process has died: by the file of the engine's region."""

from __future__ import annotations

from blink.host.heartbeat import HeartbeatAge
from blink.host.process import Hindrance
from blink.region.outside import read_heartbeat

_GONE_SECONDS = 2.0  # an engine ends by itself when its region is gone; this one has not
_NOTHING = Hindrance()


class EngineHealth:
    """Look at one engine's region. No claim is made before it was seen for the first time."""

    def __init__(self, region: str, timeout: float) -> None:
        self._region = region
        self._timeout = timeout
        self.reset()

    def reset(self) -> None:
        """Begin anew, for an engine that is about to start."""
        self.was_seen = False
        self._heartbeat = 0
        self._heartbeat_age = HeartbeatAge()

    def fault(self, now: float, hindrance: Hindrance = _NOTHING) -> str | None:
        """Say at `now` (monotonic seconds) why the engine cannot serve any more; None while it can, or boots.

        hindrance: what has kept the engine's process from working.
        """
        heartbeat = read_heartbeat(self._region)
        if heartbeat is None and not self.was_seen:
            return None
        self.was_seen = True
        silent = self._heartbeat_age.look(now, heartbeat is not None and heartbeat != self._heartbeat, hindrance)
        if heartbeat is None:
            return "has lost its region" if silent > _GONE_SECONDS else None
        self._heartbeat = heartbeat
        return f"has shown no heartbeat for {silent:.0f} s" if silent > self._timeout else None
