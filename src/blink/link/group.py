# SPDX-License-Identifier: Apache-2.0
"""The engines at one port: a client of each, and what they say together. With one engine, what that one says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from blink.errors import EngineUnavailableError
from blink.link.client import EngineClient, RegionInfo

# Statistics that describe an engine, and no amount: those of all are those of any.
_DESCRIPTIONS = ("block_size", "prefix_caching")
_TOKEN_ENERGY, _TOKENS = "token_energy_uj", "generation_tokens"


class EngineGroup:
    """Hold the clients of all engines, in the order of their numbers."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.clients = clients
        self._found: list[RegionInfo] = []  # what the engines said last, and what that comes to
        self._common: RegionInfo | None = None

    @property
    def ready(self) -> bool:
        """Whether an engine takes requests."""
        return any(client.ready for client in self.clients)

    @property
    def info(self) -> RegionInfo | None:
        """What the engines say of themselves: the limits that all keep, the sequences of all who are ready."""
        if len(self.clients) == 1:  # asked several times in each request
            [client] = self.clients
            return client.info if client.ready else None
        found = [client.info for client in self.clients if client.ready and client.info is not None]
        if found != self._found:
            self._found, self._common = found, _combine(found)
        return self._common

    @property
    def fingerprint(self) -> str:
        """What decides the bits of answers; empty where that is not the same at all engines, or is not known."""
        found = {client.fingerprint for client in self.clients}
        return found.pop() if len(found) == 1 else ""

    @property
    def unavailable_reason(self) -> str:
        """Why no engine takes requests."""
        return next((client.unavailable_reason for client in self.clients if not client.ready), "")

    def require_info(self) -> RegionInfo:
        """Return what the engines say of themselves.

        Raises:
            EngineUnavailableError: none is ready.
        """
        info = self.info
        if info is None:
            raise EngineUnavailableError(f"Not available: {self.unavailable_reason}.")
        return info

    def stats(self) -> dict[str, int]:
        """Return the statistics of all engines together; empty when there is no engine."""
        return add_stats(client.stats() for client in self.clients)

    def close(self) -> None:
        """Give all queue pairs back."""
        for client in self.clients:
            client.close()


def _combine(found: Sequence[RegionInfo]) -> RegionInfo | None:
    if len(found) <= 1:
        return found[0] if found else None
    return replace(
        found[0],
        max_model_len=min(info.max_model_len for info in found),
        max_sequences=sum(info.max_sequences for info in found),
        can_constrain=all(info.can_constrain for info in found),
    )


def add_stats(each: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add the statistics of several engines up; those that do not run have none."""
    found = [stats for stats in each if stats]
    if not found:
        return {}
    total = {name: sum(stats.get(name, 0) for stats in found) for name in found[0]}
    total |= {name: found[0][name] for name in _DESCRIPTIONS if name in total}
    if len(found) > 1 and total.get(_TOKEN_ENERGY):
        spent = sum(stats[_TOKEN_ENERGY] * stats[_TOKENS] for stats in found)
        total[_TOKEN_ENERGY] = spent // max(1, sum(stats[_TOKENS] for stats in found if stats[_TOKEN_ENERGY]))
    return total
