# SPDX-License-Identifier: Apache-2.0
"""What the bodies of all requests share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from blink.errors import BadRequestError

MAX_ID_CHARS = 256
AnyBody = TypeVar("AnyBody", bound="Body")


def own_error(error: ValidationError) -> BadRequestError | None:
    """Return the first of Blink's own errors in pydantic's, which takes them in because they are ValueErrors."""
    inner = (item.get("ctx", {}).get("error") for item in error.errors(include_url=False, include_input=False))
    return next((each for each in inner if isinstance(each, BadRequestError)), None)


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None

    def model_among(self, names: Collection[str]) -> str | None:
        """Return the model that is asked for, as one of `names` if it is one of them."""
        del names
        return self.model

    @classmethod
    def model_validate(cls: type[AnyBody], obj: Any, **options: Any) -> AnyBody:
        """Return the checked body.

        Raises:
            BadRequestError: a field asks for what is not done here.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            if own := own_error(error):
                raise own from None
            raise
