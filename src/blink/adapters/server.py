# SPDX-License-Identifier: Apache-2.0
"""What an engine answers to frontends that load and unload adapters: on threads of the host process."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from blink.adapters.memory import AdapterMemory
from blink.adapters.protocol import Held

logger = logging.getLogger("blink.engine")


def answer_adapters(memory: AdapterMemory, question: dict[str, Any]) -> dict[str, Any]:
    """Load or unload an adapter.

    Raises:
        BlinkError: it cannot be done.
    """
    if "unload" in question:
        memory.unload(Held(**question["unload"]))
        return {}
    replaced = question["replaced"]
    held = memory.load(question["load"], None if replaced is None else Held(**replaced))
    logger.info("adapter %s: index %d, content %s", question["load"], held.index, held.content)
    return {"held": asdict(held)}
