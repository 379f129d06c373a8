# SPDX-License-Identifier: Apache-2.0
"""Part: what all parts of a model's description have. Needs no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import fields


class Part:
    """A part of a model's description, whose fields with defaults are options."""

    __slots__ = ()

    def options_beyond(self, *known: str) -> list[str]:
        """Return the names of the options that are not at their defaults, but for those known."""
        assert dataclasses.is_dataclass(self)
        options = (field for field in fields(self) if field.default is not dataclasses.MISSING)
        return [one.name for one in options if one.name not in known and getattr(self, one.name) != one.default]
