# SPDX-License-Identifier: Apache-2.0
"""The weights that a request runs with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ModelVariant(NamedTuple):
    """The weights that a request runs with, where they are not the model's own."""

    fields: Mapping[str, int]  # of a submission's entry, which say what they are
    content: str  # a digest of them


BASE_MODEL = ModelVariant({}, "")
