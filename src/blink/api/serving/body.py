# SPDX-License-Identifier: Apache-2.0
"""What the bodies of all requests share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MAX_ID_CHARS = 256


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
