# SPDX-License-Identifier: Apache-2.0
"""How much a JSON text holds, and how deep: measured by native code before it becomes objects of Python."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blink.region.layout import struct_dtype
from blink.region.native import lib

# Of what a client sends: far below the depth at which parsers, encoders and templates give up, each at its own.
MAX_JSON_DEPTH = 64
# Of a body, and of the arguments of its earlier calls: objects of Python are many times larger than their JSON.
MAX_JSON_CONTAINERS = 1 << 16
MAX_JSON_ITEMS = 1 << 20
_MAX_NAME_BYTES = 64  # of a name that an error repeats
_WEIGHT = struct_dtype("JsonWeight")


class JsonWeight(NamedTuple):
    """What csrc/cpu/json_weight.h counts."""

    containers: int
    items: int
    text_bytes: int
    depth: int
    name_begin: int
    name_bytes: int

    def name_in(self, data: bytes | bytearray) -> str | None:
        """Return the name of the outermost object's member that is nested the deepest; None if there is none."""
        name = data[self.name_begin : self.name_begin + min(self.name_bytes, _MAX_NAME_BYTES)].decode(errors="replace")
        return name or None


def weigh_json(data: bytes | bytearray) -> JsonWeight:
    """Return what a text holds, in time that is linear in its length; it may be malformed."""
    view, weight = np.frombuffer(data, np.uint8), np.zeros((), _WEIGHT)
    lib.blink_json_weigh(view.ctypes.data, len(view), weight.ctypes.data)
    return JsonWeight(**{name: int(weight[name]) for name in JsonWeight._fields})


def may_be_deep(data: bytes | bytearray) -> bool:
    """Say quickly whether a text has as many brackets as one that is nested too deeply."""
    return data.count(b"[") + data.count(b"{") > MAX_JSON_DEPTH
