# SPDX-License-Identifier: Apache-2.0
"""The parts that a message grows by, in the order of its text."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import groupby
from typing import NamedTuple


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote for itself, before its answer."""

    text: str


class CallOpened(NamedTuple):
    """A tool call begins; what CallArguments follow are its."""

    name: str


class CallArguments(NamedTuple):
    """A piece of the arguments' JSON, as the model wrote it."""

    text: str


class Reading(Enum):
    """What a parser takes the text for that it read last."""

    TEXT = 0
    CALL = 1
    UNSURE = 2  # what follows will tell


Part = Content | Reasoning | CallOpened | CallArguments


def merge(parts: Iterable[Part]) -> list[Part]:
    """Join neighbours of one kind."""
    merged: list[Part] = []
    for kind, group in groupby(parts, type):
        if kind is CallOpened:
            merged += group
        else:
            merged.append(kind("".join([part[0] for part in group])))
    return merged
