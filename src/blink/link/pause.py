# SPDX-License-Identifier: Apache-2.0
"""Pauses of an engine, as whoever asks for them waits: the scheduler answers by its statistics and its state."""

from __future__ import annotations

from typing import Final

from blink.errors import BadRequestError, EngineUnavailableError
from blink.link.client import EngineClient
from blink.region.layout import Absent, Drop, Opcode, PauseMode

# By what vLLM and SGLang call them.
PAUSE_MODES: Final = {
    "abort": PauseMode.ABORT,
    "wait": PauseMode.WAIT,
    "keep": PauseMode.KEEP,
    "in_place": PauseMode.KEEP,
    "retract": PauseMode.RETRACT,
}
_LACKS: Final = {
    Absent.UNDEFINED: "its weights are undefined, as an update of them did not end: update them as a whole first",
    Absent.WEIGHTS: "its weights sleep: wake it up first",
    Absent.DISCARDED: "its weights are to be read again: wake it up first",
    Absent.KV_CACHE: "its KV cache sleeps: wake it up first",
}


def check_mode(mode: str) -> str:
    """Return the name of a mode.

    Raises:
        BadRequestError: there is none of it.
    """
    if mode not in PAUSE_MODES:
        raise BadRequestError(f"mode is one of {', '.join(PAUSE_MODES)}, got {mode!r}.", "mode")
    return mode


class Pause:
    """A pause of one engine that was asked for."""

    def __init__(self, client: EngineClient, mode: str, *, clears_cache: bool) -> None:
        """Ask for it; mode: a key of PAUSE_MODES.

        Raises:
            EngineUnavailableError: no engine is ready.
            OverloadedError: its submission queue is full.
        """
        self._client = client
        self._before = client.stats().get("num_pauses", 0)
        drop = Drop.PREFIX_CACHE if clears_cache else Drop.NOTHING
        client.order(Opcode.PAUSE, pause_mode=PAUSE_MODES[mode], pause_drop=drop)

    @property
    def has_begun(self) -> bool:
        """Whether the pause is in effect, or was taken back before it was.

        Raises:
            EngineUnavailableError: the engine has gone.
        """
        check_ready(self._client)
        return self._client.stats().get("num_pauses", 0) != self._before


class Resume:
    """An end of all pauses of one engine that was asked for."""

    def __init__(self, client: EngineClient) -> None:
        """Ask for it.

        Raises:
            BadRequestError: the engine cannot go on before its model is whole.
            EngineUnavailableError: no engine is ready.
            OverloadedError: its submission queue is full.
        """
        check_ready(client)
        for bit, reason in _LACKS.items():
            if client.absent & bit:
                raise BadRequestError(f"The engine cannot go on: {reason}.")
        self._client = client
        client.order(Opcode.RESUME)

    @property
    def is_done(self) -> bool:
        """Whether the engine goes on, or something new keeps it from that.

        Raises:
            EngineUnavailableError: the engine has gone.
        """
        check_ready(self._client)
        return not self._client.is_paused or self._client.absent != 0


def check_ready(client: EngineClient) -> None:
    """Refuse an engine that does not serve.

    Raises:
        EngineUnavailableError: it does not.
    """
    if not client.ready:
        raise EngineUnavailableError(f"Not available: {client.unavailable_reason}.")
