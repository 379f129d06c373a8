# SPDX-License-Identifier: Apache-2.0
"""Adapters in the memory of an engine's host: loads them, takes them back, and lets the least recently used make way.

The scheduler says who uses them: csrc/scheduler/adapters.h has the protocol of the region's words.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from blink.adapters.modules import list_modules
from blink.adapters.peft_files import Adapter, read_adapter
from blink.adapters.protocol import Held
from blink.errors import EngineUnavailableError, OverloadedError
from blink.kernels.lora import AdapterStore
from blink.lora_config import LoraConfig
from blink.models.decoder import Decoder
from blink.region.adapter_words import adapter_word_offset
from blink.region.memory import Region
from blink.region.native import lib

_LOOK_SECONDS = 0.001
_FOLLOW_SECONDS = 5.0  # of a scheduler that runs, which follows within a millisecond
_BRIEF_SECONDS = 0.1
_ROOM_SECONDS = 30.0  # until an adapter is there that nobody uses


class AdapterMemory:
    """Hold adapters by index. load() and unload() may be called from any thread."""

    def __init__(
        self, region: Region, ranks: Sequence[Decoder], config: LoraConfig, stores: Sequence[AdapterStore]
    ) -> None:
        """Prepare for the adapters of a model; none is there yet.

        ranks: the parts of the model; stores: where each reads its part of an adapter.
        """
        self._modules, self._max_rank = [list_modules(model) for model in ranks], config.max_lora_rank
        self._like = torch.empty(0, dtype=ranks[0].dtype)
        self._words = _Words(region, config.num_adapters)
        self._stores = stores
        self._held: list[Held | None] = [None] * config.num_adapters
        self._unused = [0] * config.num_adapters  # each one's last use when somebody asked for it
        self._contents: dict[bytes, int] = {}  # a number for each content that ever was: none names another's blocks
        self._num_loads = 0
        self._turn = threading.Lock()

    def load(self, path: str, replaced: Held | None = None) -> Held:
        """Read an adapter's folder and let sequences use it; one of the same content that is there stays.

        replaced: what no further sequence uses from then on, where the content is another.

        Raises:
            BadRequestError: it is damaged, does not fit the model or asks for what is not done here.
            OverloadedError: sequences use all adapters that are there.
            EngineUnavailableError: the scheduler does not run.
        """
        adapter = read_adapter(Path(path), self._modules, self._max_rank, self._like)
        with self._turn:
            name = adapter.content.hex()
            for held in self._held:
                if held is not None and held.content == name and self._is_offered(held):
                    self._unused[held.index] = self._words.load(held.index, "last_use")
                    return held
            if replaced is not None:
                self._withdraw(replaced)
            return self._place(self._make_room(), adapter)

    def unload(self, held: Held) -> None:
        """Let no further sequence use an adapter; its memory is free when none does. Unknown ones are ignored."""
        with self._turn:
            self._withdraw(held)
            self._words.await_seen(held.index, 0, _BRIEF_SECONDS)
            self._sweep()

    def _is_offered(self, held: Held) -> bool:
        return self._words.load(held.index, "generation") == held.generation

    def _withdraw(self, held: Held) -> None:
        if 0 <= held.index < len(self._held) and self._held[held.index] == held:
            self._words.store(held.index, "generation", 0)

    def _sweep(self) -> None:
        """Free what was withdrawn and nobody uses any more."""
        for index, held in enumerate(self._held):
            if held is not None and not self._is_offered(held) and self._words.load(index, "seen") == 0:
                self._held[index] = None
                for store in self._stores:
                    store.clear(index)

    def _place(self, index: int, adapter: Adapter) -> Held:
        self._num_loads += 1
        content = self._contents.setdefault(adapter.content, len(self._contents) + 1)
        for store in self._stores:
            store.put(index, adapter.updates)
        held = self._held[index] = Held(index, self._num_loads, adapter.content.hex())
        self._unused[index] = self._words.load(index, "last_use")
        self._words.store(index, "content", content)
        self._words.store(index, "generation", held.generation)
        if not self._words.await_seen(index, held.generation, _FOLLOW_SECONDS):
            raise EngineUnavailableError("The scheduler takes no adapter.")
        return held

    def _make_room(self) -> int:
        """Return a free index; the adapter that was not used for the longest time makes way."""
        deadline = time.monotonic() + _ROOM_SECONDS
        while time.monotonic() < deadline:
            self._sweep()
            if None in self._held:
                return self._held.index(None)
            idle = [held for held in self._held if held is not None and not self._words.load(held.index, "num_users")]
            if offered := [held for held in idle if self._is_offered(held)]:
                self._try_to_free(min(offered, key=self._last_use))
            time.sleep(_LOOK_SECONDS)
        raise OverloadedError("Requests use all adapters in memory. Retry later, or raise --max-cpu-loras.")

    def _last_use(self, held: Held) -> tuple[bool, int, int]:
        """Return when an adapter was used; one that was asked for and not used since then is about to be."""
        last = self._words.load(held.index, "last_use")
        return last == self._unused[held.index], last, held.generation

    def _try_to_free(self, held: Held) -> None:
        """Withdraw an adapter, unless a sequence has just come for it: then it stays."""
        self._withdraw(held)
        self._words.await_seen(held.index, 0, _BRIEF_SECONDS)
        if self._words.load(held.index, "num_users") > 0:
            self._words.store(held.index, "generation", held.generation)


class _Words:
    """The region's words of adapters."""

    def __init__(self, region: Region, count: int) -> None:
        self._region = region
        self._count = count

    def store(self, index: int, field: str, value: int) -> None:
        lib.blink_store_u32(self._address(index, field), value)

    def load(self, index: int, field: str) -> int:
        return lib.blink_load_u32(self._address(index, field))

    def await_seen(self, index: int, generation: int, seconds: float) -> bool:
        """Wait until the scheduler follows; say whether it did."""
        deadline = time.monotonic() + seconds
        while self.load(index, "seen") != generation:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS / 4)
        return True

    def _address(self, index: int, field: str) -> int:
        assert 0 <= index < self._count
        return self._region.address + adapter_word_offset(self._region.header, index, field)
