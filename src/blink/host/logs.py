# SPDX-License-Identifier: Apache-2.0
"""What processes say on stderr: lines of text for people, or one JSON object a line for log collectors."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Final

FORMATS: Final = ("text", "json")
_INDENT: Final = "    "
_CLIENT: Final = "httpx"  # the library that writes a line for each request that it sends, such as to a hub
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """Make one JSON object of each record; `extra={"fields": {...}}` adds members of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Make one line of each record, whoever wrote its message: what is not printable is escaped.

    The lines of an exception stand below it, each indented, so that none looks like a record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return _printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return the lines of an exception."""
        return "\n".join(_INDENT + _printable(line) for line in super().formatException(ei).splitlines())


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


def set_up_logging(level: str, log_format: str, text: str = _TEXT) -> None:
    """Send all records of this level and above to stderr, in one of FORMATS; `text` is how text looks."""
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(text))
    logging.basicConfig(level=level.upper(), handlers=[output], force=True)
    logging.getLogger(_CLIENT).setLevel(level.upper() if level.upper() == "DEBUG" else logging.WARNING)
