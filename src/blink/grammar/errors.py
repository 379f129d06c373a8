# SPDX-License-Identifier: Apache-2.0
"""Why a grammar is refused; each is an error of the request."""

from __future__ import annotations

from blink.errors import BadRequestError


class GrammarError(BadRequestError):
    """A grammar is malformed, or asks for what cannot be constrained."""


class GrammarTooLargeError(GrammarError):
    """A grammar needs more states or work than one may."""


class AmbiguousGrammarError(GrammarError):
    """One byte does not always decide how a grammar goes on."""
