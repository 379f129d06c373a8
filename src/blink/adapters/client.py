# SPDX-License-Identifier: Apache-2.0
"""A frontend's view of the adapters in its engine's memory: those that were evicted are loaded again."""

from __future__ import annotations

import asyncio

from blink.adapters.protocol import Held, ask_load, ask_unload
from blink.errors import BadRequestError
from blink.link.client import EngineClient
from blink.region.adapter_words import adapter_word_offset
from blink.text.prompt import PromptRules


class AdapterClient:
    """Loads adapters by their paths."""

    def __init__(self, region: str, client: EngineClient) -> None:
        self._region = region
        self._client = client
        self._held: dict[str, Held] = {}  # by path
        self._turns: dict[str, asyncio.Lock] = {}

    def hold(self, path: str, *, anew: bool = False) -> Held:
        """Return an adapter that the engine has; blocks while it is loaded. anew: its files are read again.

        Raises:
            BadRequestError: the engine takes no adapters, or this one is damaged or does not fit.
            OverloadedError: sequences use all adapters that are there.
            EngineUnavailableError: the engine does not answer.
        """
        held = None if anew else self._find(path)
        if held is None:
            held = self._held[path] = ask_load(self._region, path, self._held.get(path) if anew else None)
        return held

    async def hold_soon(self, path: str, *, anew: bool = False) -> Held:
        """Do what hold() does without blocking the event loop."""
        found = None if anew else self._find(path)
        if found is not None:
            return found
        async with self._turns.setdefault(path, asyncio.Lock()):
            return await asyncio.to_thread(self.hold, path, anew=anew)

    async def drop(self, path: str) -> None:
        """Let no further sequence use an adapter; the engine frees it when none does.

        Raises:
            EngineUnavailableError: the engine does not answer.
        """
        self._turns.pop(path, None)
        held = self._held.pop(path, None)
        if held is not None:
            await asyncio.to_thread(ask_unload, self._region, held)

    def uses(self, path: str) -> tuple[int, int]:
        """Return how many sequences of all frontends run with an adapter, and how many wait for its place."""
        held = self._held.get(path)
        if held is None or not self._is_there(held):
            return 0, 0
        ready, users = (self._word(held, name) for name in ("num_in_slots", "num_users"))
        return ready, max(users - ready, 0)

    def _find(self, path: str) -> Held | None:
        """Return an adapter if the engine has it now."""
        info = self._client.info
        if info is not None and not info.num_adapters:
            raise BadRequestError("This server's engine takes no adapters (--enable-lora).", "lora_request")
        held = self._held.get(path)
        return held if held is not None and self._is_there(held) else None

    def _is_there(self, held: Held) -> bool:
        """Say whether the engine still has an adapter."""
        return self._word(held, "generation") == held.generation

    def _word(self, held: Held, name: str) -> int:
        """Load a word of an adapter; 0 where there is none."""
        info = self._client.info
        if info is None or not 0 <= held.index < info.num_adapters:
            return 0
        return self._client.read_word(lambda header: adapter_word_offset(header, held.index, name))


def rules_with(rules: PromptRules, held: Held) -> PromptRules:
    """Return the rules of a request that uses an adapter."""
    return rules._replace(variant=held.variant)
