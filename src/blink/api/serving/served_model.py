# SPDX-License-Identifier: Apache-2.0
"""What routes that tell of the model need of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from blink.link.client import RegionInfo
from blink.text.assets import ModelAssets


class ServedModel(Protocol):
    """The one model of a server."""

    assets: ModelAssets

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return all names to which the model answers."""
        ...

    @property
    def engine(self) -> RegionInfo:
        """Return what the engine says about itself.

        Raises:
            EngineUnavailableError: it does not run.
        """
        ...

    @property
    def engine_stats(self) -> Mapping[str, int]:
        """Return the engine's statistics; nothing while there is no engine."""
        ...
