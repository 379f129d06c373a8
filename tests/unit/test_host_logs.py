# SPDX-License-Identifier: Apache-2.0
"""Log lines: one for each record, whatever a client or a file put into its message."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from blink.host.logs import JsonFormatter, TextFormatter, set_up_logging

FORGED = "2026-11-26 00:00:00,000 INFO blink.api: FORGED"
# What begins a new line, or moves or paints what a terminal shows.
BREAKS = [
    "\n",
    "\r",
    "\r\n",
    "\v",
    "\f",
    "\x1c",
    "\x85",
    "\u2028",
    "\u2029",
    "\x1b[2K\x1b[1A",
    "\x9b2J",
    "\b" * 9,
    "\u202e",
]


def record_of(text: str, *args: object, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("blink.api", logging.INFO, "", 0, text, args, exc_info)  # type: ignore[arg-type]


def line_of(text: str, *args: object, exc_info: object = None) -> str:
    return TextFormatter("%(levelname)s %(name)s: %(message)s").format(record_of(text, *args, exc_info=exc_info))


@pytest.mark.parametrize("mark", BREAKS)
@pytest.mark.parametrize("form", ["refused with 404: The model `%s` does not exist.", "%s"])
def test_no_text_makes_a_line_of_its_own(form: str, mark: str) -> None:
    line = line_of(form, f"x{mark}{FORGED}")
    assert line.isprintable() and line.splitlines() == [line]
    assert line.startswith("INFO blink.api: ") and "FORGED" in line


def test_what_is_printable_stays_as_it_is() -> None:
    assert line_of("größe %d, 東京, C:\\new, 😀", 5) == "INFO blink.api: größe 5, 東京, C:\\new, 😀"


def test_what_is_escaped_can_be_read() -> None:
    assert line_of("a\nb\x1bc\u2028d\ud800e").endswith(": a\\nb\\x1bc\\u2028d\\ud800e")


@pytest.mark.parametrize("mark", BREAKS)
def test_no_line_of_an_exception_looks_like_a_record(mark: str) -> None:
    try:
        raise ValueError(f"a{mark}{FORGED}")
    except ValueError:
        lines = line_of("failed", exc_info=sys.exc_info()).split("\n")
    assert lines[0] == "INFO blink.api: failed" and any("FORGED" in line for line in lines)
    assert all(line.startswith("    ") and line.isprintable() for line in lines[1:])


@pytest.mark.parametrize("mark", BREAKS)
def test_an_object_is_one_line_too(mark: str) -> None:
    line = JsonFormatter().format(record_of("%s", f"x{mark}{FORGED}"))
    assert line.splitlines() == [line] and json.loads(line)["message"] == f"x{mark}{FORGED}"


@pytest.mark.parametrize(("level", "is_shown"), [("info", False), ("debug", True)])
def test_requests_that_a_library_sends_are_shown_for_debugging_alone(
    level: str, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    root, library = logging.getLogger(), logging.getLogger("httpx")
    before = root.handlers[:], root.level, library.level
    try:
        set_up_logging(level, "text")
        library.info("HTTP Request: GET http://hub.test/config.json")
        logging.getLogger("blink.hub").info("downloading")
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        library.setLevel(before[2])
    shown = capsys.readouterr().err
    assert ("HTTP Request" in shown) is is_shown
    assert "downloading" in shown
