# SPDX-License-Identifier: Apache-2.0
"""What frontends and an engine's host process say to each other about adapters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from blink.link.variant import ModelVariant
from blink.region.engine_socket import ask_engine

SOCKET: Final = "adapters"
_WAIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Held:
    """An adapter in an engine's memory, by the index and generation that the region's words have."""

    index: int
    generation: int
    content: str  # hexadecimal digest of all that its results depend on

    @property
    def variant(self) -> ModelVariant:
        """The model with it, as requests name it."""
        return ModelVariant({"adapter": self.index + 1, "adapter_generation": self.generation}, self.content)


def ask_load(region: str, path: str, replaced: Held | None = None) -> Held:
    """Let an engine load an adapter; blocks until it is there.

    Raises:
        BadRequestError: the adapter is damaged, does not fit the model or asks for what is not done here.
        OverloadedError: sequences use all adapters that are there.
        EngineUnavailableError: no engine answers.
    """
    question = {"load": path, "replaced": None if replaced is None else asdict(replaced)}
    return Held(**ask_engine(region, SOCKET, question, _WAIT_SECONDS)["held"])


def ask_unload(region: str, held: Held) -> None:
    """Let no further sequence use an adapter.

    Raises:
        EngineUnavailableError: no engine answers.
    """
    ask_engine(region, SOCKET, {"unload": asdict(held)}, _WAIT_SECONDS)
