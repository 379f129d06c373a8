# SPDX-License-Identifier: Apache-2.0
"""The metrics of one moment, from a server's /metrics or from a region of this machine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import httpx
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from blink.api.observe.metric_store import Worker, WorkerFiles
from blink.api.observe.metrics import NUM_VALUES, MetricView, num_engines_of, num_values
from blink.errors import BlinkError, ConfigError, EngineUnavailableError
from blink.region.files import engine_regions
from blink.region.report import RegionReport

_TIMEOUT = 5.0  # seconds


class Samples:
    """The values of one moment by name and labels."""

    def __init__(self, families: Iterable[Metric], at: float) -> None:
        """Take metrics that were read at `at` (seconds, time.monotonic)."""
        self.at = at
        self.model = ""
        self._by_name: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in families:
            for sample in family.samples:
                self._by_name[sample.name].append((sample.labels, sample.value))
                self.model = self.model or sample.labels.get("model_name", "")

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name that have these labels; 0 if there is none."""
        return sum(
            value for found, value in self._by_name.get(name, ()) if all(found.get(k) == v for k, v in labels.items())
        )

    def mean(self, name: str) -> float:
        """Return the mean of a name's samples that are not 0; 0 if there is none."""
        values = [value for _, value in self._by_name.get(name, ()) if value]
        return sum(values) / max(1, len(values))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a name by one label, in their order; those of all engines added up."""
        found: dict[str, float] = {}
        for labels, value in self._by_name.get(name, ()):
            if label in labels:
                found[labels[label]] = found.get(labels[label], 0) + value
        return found

    def buckets(self, name: str) -> dict[float, float]:
        """Return the cumulated counts of a histogram by upper bound."""
        return {float(bound): count for bound, count in self.by_label(f"{name}_bucket", "le").items()}


class Source(Protocol):
    """Where samples come from."""

    place: str  # as shown to people

    def read(self) -> Samples:
        """Read the present values.

        Raises:
            EngineUnavailableError: nothing answers now.
            BlinkError: what answers is no server of Blink's.
        """
        ...

    def close(self) -> None:
        """Let go of the source."""
        ...


class ServerSource:
    """A server's /metrics."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Prepare to ask the server at `url`.

        Raises:
            ConfigError: the URL is none.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: give a full address such as http://127.0.0.1:8000")
        self.place = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        is_local = httpx.URL(url).host in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(timeout=_TIMEOUT, headers=headers, trust_env=not is_local)

    def read(self) -> Samples:
        """Scrape."""
        try:
            response = self._http.get(f"{self.place}/metrics")
        except httpx.HTTPError as error:
            raise EngineUnavailableError(f"no server at {self.place}: {error}") from error
        if response.is_error:
            raise BlinkError(f"{self.place}/metrics answers {response.status_code}")
        try:
            return Samples(text_string_to_metric_families(response.text), time.monotonic())
        except ValueError as error:
            raise BlinkError(f"{self.place}/metrics is not in Prometheus format: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


class RegionSource:
    """The regions of a server on this machine and what its frontends have counted; none of its processes takes part."""

    def __init__(self, region: str) -> None:
        self.place = f"region {region}"
        self._region = region
        self._files = WorkerFiles(region, NUM_VALUES)

    def workers(self) -> list[Worker]:
        """Return the numbers of the server's frontends."""
        return self._files.read()

    def read(self) -> Samples:
        """Read the regions, whichever engines have them now."""
        num_engines = num_engines_of(self._files.count_values())
        self._files.size_bytes = 8 * num_values(num_engines)
        reports = [_open_report(region) for region in engine_regions(self._region, num_engines)]
        found = [report for report in reports if isinstance(report, RegionReport)]
        try:
            if not found:
                raise next(error for error in reports if isinstance(error, EngineUnavailableError))
            view = MetricView(self, [_no_stats if isinstance(each, BlinkError) else each.stats for each in reports])
            view.model_name = found[0].model
            return Samples(view.collect(), time.monotonic())
        finally:
            for report in found:
                report.close()

    def close(self) -> None:
        """Let go of the frontends' files."""
        self._files.close()


def _open_report(region: str) -> RegionReport | EngineUnavailableError:
    try:
        return RegionReport(region)
    except EngineUnavailableError as error:
        return error


def _no_stats() -> dict[str, int]:
    return {}
