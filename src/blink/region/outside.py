# SPDX-License-Identifier: Apache-2.0
"""What a supervisor needs of a region that it does not map. Needs no numpy, which takes longest of all to load."""

from __future__ import annotations

import os
import sys
from typing import Final

from blink.errors import ConfigError
from blink.region.constants import CONSTANTS, TABLE
from blink.region.files import open_own, region_path

HASH_KEY_VARIABLE: Final = "BLINK_HASH_KEY"  # of engines whose prompts one frontend hashes
_HEARTBEAT_OFFSET: Final = CONSTANTS["control_offset"] + TABLE["structs"]["Control"]["heartbeat"][1]


def read_heartbeat(name: str) -> int | None:
    """Read the heartbeat in a region's file; None if there is none.

    It is read and not mapped: a file may be truncated at any time, and touching a mapping of it would be fatal.
    """
    try:
        fd = open_own(region_path(name), os.O_RDONLY)
    except (FileNotFoundError, ConfigError):
        return None
    try:
        word = os.pread(fd, 8, _HEARTBEAT_OFFSET)
    finally:
        os.close(fd)
    return int.from_bytes(word, sys.byteorder) if len(word) == 8 else None
