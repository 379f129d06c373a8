# SPDX-License-Identifier: Apache-2.0
"""Metrics as Prometheus' text. The library's own writer takes four milliseconds, in which no token would leave."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

_PLAIN = 1e6  # smaller numbers are written as Python writes them
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def write_text(families: Iterable[Metric]) -> bytes:
    """Return the text format 0.0.4 of these metrics."""
    lines: list[str] = []
    for family in families:
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        kind = "gauge" if family.type == "info" else family.type
        text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")
        lines += [f"{s.name}{_write_labels((*s.labels.items(),))} {_write_value(s.value)}" for s in family.samples]
    return "\n".join([*lines, ""]).encode()


@lru_cache(maxsize=4096)  # each scrape has the same
def _write_labels(labels: tuple[tuple[str, str], ...]) -> str:
    return "{" + ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels)]) + "}"


def _write_value(value: float) -> str:
    return repr(float(value)) if -_PLAIN < value < _PLAIN else floatToGoString(value)
