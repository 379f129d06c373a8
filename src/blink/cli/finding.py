# SPDX-License-Identifier: Apache-2.0
"""What `blink doctor` says about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look found; `fail` means that serving is not possible."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    advice: str = ""
