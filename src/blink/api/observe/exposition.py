# SPDX-License-Identifier: Apache-2.0
"""Metrics as Prometheus' text. What does not change between two scrapes is written once: no token waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

_PLAIN = 1e6  # smaller numbers are written as Python writes them
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_ENDINGS = {"counter": "_total", "info": "_info"}

Source = TypeVar("Source")
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Family(Generic[Source]):
    """The metrics of one name, and how their values are read."""

    name: str
    text: str
    kind: str  # Prometheus' type
    samples: tuple[tuple[str, Labels], ...]  # what follows the name, and the labels
    read: Callable[[Source], Sequence[float]]  # one value for each sample


def merge_families(parts: Sequence[Iterable[Family[Source]]]) -> Iterator[Family[Sequence[Source]]]:
    """Yield families that show those of several sources, one of each part: a name may occur once on a page."""
    by_name: dict[str, list[tuple[int, Family[Source]]]] = {}
    for index, families in enumerate(parts):
        for family in families:
            by_name.setdefault(family.name, []).append((index, family))
    for name, found in by_name.items():
        family = found[0][1]
        samples = tuple(sample for _, each in found for sample in each.samples)
        yield Family(name, family.text, family.kind, samples, partial(_read_each, found))


def _read_each(families: list[tuple[int, Family[Source]]], sources: Sequence[Source]) -> list[float]:
    return [value for index, family in families for value in family.read(sources[index])]


class Page(Generic[Source]):
    """Families that are shown together, for as long as their names and labels stay the same."""

    def __init__(self, families: Iterable[Family[Source]]) -> None:
        self._parts = [_Part(family) for family in families]

    def write(self, source: Source) -> bytes:
        """Return the text format 0.0.4."""
        return b"".join([part.write(source) for part in self._parts])

    def collect(self, source: Source) -> Iterator[Metric]:
        """Yield the metrics for those who look at values."""
        for part in self._parts:
            family = part.family
            metric = Metric(family.name, family.text, family.kind)
            for (ending, labels), value in zip(family.samples, family.read(source), strict=True):
                metric.add_sample(family.name + ending, dict(labels), value)
            yield metric


class _Part(Generic[Source]):
    """The text of one family, which is kept until a value changes."""

    __slots__ = ("_form", "_text", "_values", "family")

    def __init__(self, family: Family[Source]) -> None:
        self.family = family
        self._form = ""  # made by the first to write: who only collects needs none
        self._values: Sequence[float] | None = None
        self._text = b""

    def write(self, source: Source) -> bytes:
        values = self.family.read(source)
        if values != self._values:
            self._values, self._form = values, self._form or _write_form(self.family)
            self._text = (self._form % (*map(_write_value, values),)).encode()
        return self._text


def _write_form(family: Family[Source]) -> str:
    """Return the text with %s for each value."""
    name = family.name + _ENDINGS.get(family.kind, "")
    kind = "gauge" if family.kind == "info" else family.kind
    text = family.text.replace("\\", r"\\").replace("\n", r"\n")
    head = f"# HELP {name} {text}\n# TYPE {name} {kind}\n".replace("%", "%%")
    rows = [f"{family.name}{ending}{_write_labels(labels)} ".replace("%", "%%") for ending, labels in family.samples]
    return head + "".join([f"{row}%s\n" for row in rows])


def _write_labels(labels: Labels) -> str:
    return "{" + ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels)]) + "}"


def _write_value(value: float) -> str:
    return repr(float(value)) if -_PLAIN < value < _PLAIN else floatToGoString(value)
