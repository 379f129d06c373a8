# SPDX-License-Identifier: Apache-2.0
"""Load what one command needs when it runs: the others, and --help, do without."""

from __future__ import annotations

import gc
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from blink.errors import ConfigError
from blink.host.extras import how_to_install


def load(module: str, needed_by: str = "this") -> Any:
    """Return a module.

    Raises:
        ConfigError: it needs a package that is not installed.
    """
    is_collecting = gc.isenabled()
    gc.disable()  # nearly all that modules make stays: to look for what does not takes a seventh of torch's time
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "blink").partition(".")[0] == "blink":
            raise
        raise _not_installed(error.name, needed_by) from error
    finally:
        if is_collecting:
            gc.enable()


def check_there(package: str, needed_by: str) -> None:
    """Refuse to go on without a package, which takes long to load.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec(package) is None:
        raise _not_installed(package, needed_by)


def _not_installed(package: str | None, needed_by: str) -> ConfigError:
    return ConfigError(f"{needed_by} needs {package}, which is not installed: {how_to_install('engine')}")
