# SPDX-License-Identifier: Apache-2.0
"""Which set of values is meant where a schema, or a format in it, may be read in several ways."""

from __future__ import annotations

from enum import Enum


class Reading(Enum):
    """How a schema is read.

    Formats and patterns have texts that validators judge differently, or that no small automaton can judge. Such a
    text is neither written nor, where a schema stands under `not`, taken for one that its format forbids.
    """

    USUAL = "values that are surely valid"
    NARROW = "as USUAL; of a schema without a type only the types that its keywords speak of, which is what is meant"
    WHOLE = "values that are surely valid, those of options without a type too"
    OUTER = "all values that may be valid"

    @property
    def of_parts(self) -> Reading:
        """Return how what holds together with others is read."""
        return Reading.USUAL if self is Reading.NARROW else self

    @property
    def of_options(self) -> Reading:
        """Return how the options of anyOf and oneOf are read."""
        return Reading.NARROW if self.of_parts is Reading.USUAL else self

    @property
    def of_conditions(self) -> Reading:
        """Return how the schema after `if` is read where it holds."""
        return Reading.OUTER if self is Reading.OUTER else Reading.WHOLE

    @property
    def of_negation(self) -> Reading:
        """Return how a schema is read whose values are taken away."""
        return Reading.WHOLE if self is Reading.OUTER else Reading.OUTER
