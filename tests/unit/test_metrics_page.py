# SPDX-License-Identifier: Apache-2.0
"""The page of metrics names each metric of a server, and no other."""

from __future__ import annotations

import re
from array import array
from pathlib import Path

from prometheus_client.core import Metric

from blink.api.observe.metric_store import Worker
from blink.api.observe.metrics import NUM_VALUES, MetricView

_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()


class OneWorker:
    """A store with one worker."""

    def workers(self) -> list[Worker]:
        return [Worker(pid=1, is_alive=True, values=memoryview(array("d", [0.0] * NUM_VALUES)))]


def collect() -> list[Metric]:
    return [*MetricView(OneWorker(), [lambda: {"num_blocks": 1, "energy_mj": 1, "token_energy_uj": 1}]).collect()]


_OF_ADAPTERS = {"vllm:lora_requests_info"}  # which servers without --enable-lora do not have


def test_the_page_names_every_metric_and_no_other() -> None:
    named = {name.removesuffix("_total") for name in re.findall(r"\b(?:vllm|blink):\w+", _PAGE)}
    assert named == _OF_ADAPTERS | {metric.name.removesuffix("_total") for metric in collect()}
