# SPDX-License-Identifier: Apache-2.0
"""The number formats of safetensors checkpoints, each with its module's word on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blink.formats.base import NumberFormat, Storage, UnitFormat
from blink.formats.fp8 import Fp8
from blink.formats.int4 import Int4
from blink.formats.matrix import QuantizedMatrix
from blink.formats.mxfp4 import Mxfp4
from blink.formats.schemes import FormatId

UNIT_FORMATS: Mapping[FormatId, UnitFormat[QuantizedMatrix]] = {one.id: one for one in (Fp8(), Int4())}
FORMATS: Mapping[FormatId, NumberFormat[Any]] = {**UNIT_FORMATS, Mxfp4.id: Mxfp4()}
STORAGES: Mapping[str, Storage[Any]] = {name: found for one in FORMATS.values() for name, found in one.storages.items()}
