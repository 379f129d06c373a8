# SPDX-License-Identifier: Apache-2.0
"""What the engines share: the words of the region that the host writes, and how a run ends."""

from __future__ import annotations

import logging
from typing import Protocol

from blink.config import EngineConfig
from blink.layout import EngineState, ErrorCode
from blink.model_files import resolve_model
from blink.region import Region

logger = logging.getLogger("blink.engine")


class Engine(Protocol):
    """A loaded engine; frontends see it while run() runs."""

    def run(self) -> int:
        """Serve until drained or stopped and return the exit status: 0, or 1 after an error."""
        ...

    def drain(self) -> None:
        """Let running requests end and refuse new ones; run() returns when all are done."""
        ...

    def stop(self) -> None:
        """End the scheduler at its next pass; open requests are lost."""
        ...


class EngineControl:
    """The host's side of a region's control block."""

    def __init__(self, region: Region) -> None:
        self._region = region

    @property
    def state(self) -> int:
        """The scheduler's state, a layout.EngineState."""
        return self._region.control_word("state")

    def drain(self) -> None:
        """Ask the scheduler to finish what runs and take nothing new."""
        self._region.store_control("drain", 1)

    def stop(self) -> None:
        """Ask the scheduler to end now."""
        self._region.store_control("stop", 1)

    def finish(self) -> int:
        """Clean up behind a scheduler that has ended and return the process's exit status."""
        if self.state != EngineState.FAILED:
            self._region.path.unlink(missing_ok=True)
            return 0
        # The file stays, so that frontends can read the error; the next engine replaces it.
        place, detail = (self._region.control_word(f"error_{word}") for word in ("place", "detail"))
        error = ErrorCode(self._region.control_word("error_code"))
        logger.error("the scheduler stopped: %s (place %d, detail %d)", error.name, place, detail)
        return 1


def served_name(config: EngineConfig) -> str:
    """Return the model's name in the API: --served-model-name, or what MODEL names, or the default model's name."""
    model = config.model
    return model.served_model_name or model.model or resolve_model("").name.split(".")[0]
