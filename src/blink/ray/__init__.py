# SPDX-License-Identifier: Apache-2.0
"""Blink on several machines: a Ray Serve application whose replicas are engines with their frontends. Extra `ray`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from blink.errors import ConfigError
from blink.host.extras import how_to_install

if TYPE_CHECKING:
    from pydantic import JsonValue
    from ray.serve import Application


def app(arguments: Mapping[str, JsonValue]) -> Application:
    """Build the application from the fields of `blink.ray.config.AppArgs`: `serve run blink.ray:app model=PATH`.

    Raises:
        ConfigError: Ray is not installed, or an argument makes no sense.
    """
    try:
        from blink.ray.application import build
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs {error.name}, which is not installed: {how_to_install('ray')}") from error
    return build(arguments)
