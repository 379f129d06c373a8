# SPDX-License-Identifier: Apache-2.0
"""A compiled automaton, as it travels to the engine."""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b

from blink.region.constants import CONSTANTS

_HASH_BYTES = CONSTANTS["automaton_hash_bytes"]


class Automaton:
    """The bytes of an automaton (csrc/region/automaton.h)."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @cached_property
    def name(self) -> bytes:
        """Return the name that its contents give it."""
        return blake2b(self.data, digest_size=_HASH_BYTES).digest()
