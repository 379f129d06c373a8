# SPDX-License-Identifier: Apache-2.0
"""How an engine's process ends once its scheduler has."""

from __future__ import annotations

import logging

from blink.region.layout import EngineState, ErrorCode, place_name
from blink.region.memory import Region

logger = logging.getLogger("blink.engine")


def conclude(region: Region) -> int:
    """Clean up behind a scheduler that has ended and return the process's exit status."""
    if region.control_word("state") != EngineState.FAILED:
        region.remove()
        return 0
    # The file stays, so that frontends can read the error; the next engine replaces it.
    place, detail = (region.control_word(f"error_{word}") for word in ("place", "detail"))
    error = ErrorCode(region.control_word("error_code"))
    logger.error("the scheduler stopped: %s (%s, detail %d)", error.name, place_name(place), detail)
    return 1
