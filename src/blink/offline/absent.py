# SPDX-License-Identifier: Apache-2.0
"""Methods of vLLM's LLM that are not here: each says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from blink.errors import BadRequestError

_POOLING = "use embed() or score()"
_WORKERS = "the engine has no Python workers"
_PROFILE = "profile the process with the tools of its device"


def _absent(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise BadRequestError(f"{name}() is not supported: {reason}.")

    refuse.__name__ = name
    refuse.__doc__ = f"Refuse: {reason}."
    return refuse


class Absent:
    """What raises BadRequestError, which is a ValueError, whatever it is called with."""

    encode = _absent("encode", _POOLING)
    classify = _absent("classify", _POOLING)
    apply_model = _absent("apply_model", _WORKERS)
    start_profile = _absent("start_profile", _PROFILE)
    stop_profile = _absent("stop_profile", _PROFILE)
    get_metrics = _absent("get_metrics", "stats() returns the engine's counters and gauges")
