# SPDX-License-Identifier: Apache-2.0
"""Load what one command needs when it runs: the others, and --help, do without."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from blink.errors import ConfigError
from blink.host.extras import how_to_install


def load(module: str, needed_by: str = "this") -> Any:
    """Return a module.

    Raises:
        ConfigError: it needs a package that is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "blink").partition(".")[0] == "blink":
            raise
        raise ConfigError(
            f"{needed_by} needs {error.name}, which is not installed: {how_to_install('engine')}"
        ) from error
