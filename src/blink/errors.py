# SPDX-License-Identifier: Apache-2.0
"""The exceptions of Blink. Each carries the HTTP status and the error type that the API answers with."""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar, Final

# How the message of a request begins that an engine had taken, in contrast to those that were refused.
LOST_REQUEST: Final = "The request was lost"


class BlinkError(Exception):
    """Base of all errors that Blink raises on purpose.

    Those that a caller's values bring about are ValueErrors too, as in vLLM.
    """

    status: ClassVar[int] = HTTPStatus.INTERNAL_SERVER_ERROR
    type: ClassVar[str] = "InternalServerError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(BlinkError, ValueError):
    """A flag, a file or the machine does not fit; the message says what to change."""


class StepFailedError(BlinkError):
    """A step failed for a reason that the scheduler knows: `output` is csrc's StepOutput of it."""

    def __init__(self, message: str, output: int) -> None:
        super().__init__(message)
        self.output = output


class BadRequestError(BlinkError, ValueError):
    """The request is malformed or asks for something that this server does not do."""

    status = HTTPStatus.BAD_REQUEST
    type = "BadRequestError"


class PromptTooLongError(BadRequestError):
    """A prompt is longer than the context, or with the tokens asked for (`token_limit`, if they are the reason)."""

    num_tokens: str = ""  # of the prompt; or more than how many
    token_limit: int = 0
    max_model_len: int = 0

    def measured(self, num_tokens: str, token_limit: int, max_model_len: int) -> PromptTooLongError:
        """Return the error with the lengths that it is about."""
        self.num_tokens, self.token_limit, self.max_model_len = num_tokens, token_limit, max_model_len
        return self


class NotFoundError(BlinkError):
    """The named model or route does not exist."""

    status = HTTPStatus.NOT_FOUND
    type = "NotFoundError"


class OverloadedError(BlinkError):
    """A queue is full; the client should retry later."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "ServiceUnavailableError"


class ClientLimitError(BlinkError):
    """One client has as much of the server as it may have at once; it should retry later."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "TooManyRequestsError"


class ClientGoneError(BlinkError):
    """The client has closed its connection: nobody reads the answer, and nothing went wrong here."""

    status = 499  # as nginx has it; HTTP has none
    type = "ClientClosedRequest"

    def __init__(self) -> None:
        super().__init__("The client closed the connection.")


class EngineUnavailableError(BlinkError):
    """The engine is starting, draining, stopped or dead."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "ServiceUnavailableError"


class LayoutMismatchError(BlinkError):
    """Frontend and engine were built from different layouts of the region."""


def wrong_value(param: str, rule: str, value: object) -> BadRequestError:
    """Return the error of a parameter that is not as a rule has it."""
    return BadRequestError(f"{param} must be {rule}, got {value}.", param)
