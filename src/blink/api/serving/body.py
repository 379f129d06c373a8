# SPDX-License-Identifier: Apache-2.0
"""What the bodies of all requests share."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from blink.errors import BadRequestError

MAX_ID_CHARS = 256
AnyBody = TypeVar("AnyBody", bound="Body")


@contextmanager
def own_errors() -> Iterator[None]:
    """Let errors of Blink's own out of pydantic's, which takes them in because they are ValueErrors.

    Raises:
        BadRequestError: the first of them.
    """
    try:
        yield
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            own = item.get("ctx", {}).get("error")
            if isinstance(own, BadRequestError):
                raise own from None
        raise


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
        with own_errors():
            return super().model_validate(obj, **options)
