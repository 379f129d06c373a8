# SPDX-License-Identifier: Apache-2.0
"""The native library's table of structs, codes and constants, and the constants by name; needs no numpy."""

from __future__ import annotations

import json
import re
from typing import Any

from blink.region.native import lib

TABLE: dict[str, dict[str, Any]] = json.loads(lib.blink_layout_text())


def split_words(native_name: str) -> str:
    """Return the words of a name such as kMaxGraphs as max_graphs."""
    return "_".join(re.findall("[A-Z][a-z0-9]*", native_name)).lower()


CONSTANTS: dict[str, int] = {split_words(name): value for name, value in TABLE["constants"].items()}
