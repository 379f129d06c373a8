# SPDX-License-Identifier: Apache-2.0
"""Headers of a request, read as ASGI has them."""

from __future__ import annotations

from typing import Any

from blink.api.http.headers import header_of

SCOPE: dict[str, Any] = {"headers": [(b"a", b"first"), (b"b", b"caf\xe9"), (b"a", b"second")]}


def test_the_first_header_of_a_name_is_found() -> None:
    assert header_of(SCOPE, b"a") == "first"


def test_headers_are_latin_1_and_an_absent_one_is_empty() -> None:
    assert header_of(SCOPE, b"b") == "café"
    assert header_of(SCOPE, b"c") == ""
