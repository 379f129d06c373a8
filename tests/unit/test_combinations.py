# SPDX-License-Identifier: Apache-2.0
"""Features that do not go together are refused by name, and each of them alone is not."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from blink.config import EngineConfig
from blink.engine.combinations import COMBINATIONS, check_combinations
from blink.errors import ConfigError
from blink.lora_config import LoraConfig

ADAPTERS = {"lora": LoraConfig(enable_lora=True)}
RANKS: dict[str, Any] = {"tensor_parallel_size": 3}
DETERMINISTIC = {"deterministic": True}
EAGLE = {"speculative_config": json.dumps({"method": "eagle3", "model": "somewhere"})}
MTP = {"speculative_config": json.dumps({"method": "mtp"})}
NGRAMS = {"speculative_config": json.dumps({"method": "ngram"})}
RDMA = {"rdma_listen": "0.0.0.0:7000"}
INT16 = {"cpu_gemm": "int16"}
BFLOAT16 = {"cpu_prompt_gemm": "bfloat16"}
HUGE = {"max_num_batched_tokens": 65_536}
BOTH = ("cpu", "cuda")
REFUSED = [
    (ADAPTERS, RDMA, BOTH, "--enable-lora: frontends of other machines"),
    (ADAPTERS, DETERMINISTIC, BOTH, "--deterministic does not go with --enable-lora"),
    (ADAPTERS, EAGLE, ("cuda",), "draft heads and adapters do not run together on GPUs"),
    (ADAPTERS, MTP, ("cuda",), "draft heads and adapters do not run together on GPUs"),
    (RANKS, DETERMINISTIC, BOTH, "--deterministic works with one rank"),
    (RANKS, EAGLE, BOTH, "draft heads run on one rank: leave out --tensor-parallel-size 3"),
    (RANKS, MTP, BOTH, "draft heads run on one rank: leave out --tensor-parallel-size 3"),
    (HUGE, DETERMINISTIC, ("cuda",), "--deterministic takes steps of up to 65535 tokens"),
    (INT16, DETERMINISTIC, ("cpu",), "--cpu-gemm int16 goes neither with"),
    (INT16, RANKS, ("cpu",), "--cpu-gemm int16 goes neither with"),
    (BFLOAT16, DETERMINISTIC, ("cpu",), "--cpu-prompt-gemm bfloat16 goes neither with"),
    (BFLOAT16, RANKS, ("cpu",), "--cpu-prompt-gemm bfloat16 goes neither with"),
]
ALL = [ADAPTERS, RANKS, DETERMINISTIC, EAGLE, MTP, NGRAMS, RDMA, INT16, BFLOAT16, HUGE]


def find_refusal(device: str, *features: dict[str, Any]) -> str:
    """Return how features are refused together; empty: they are not."""
    config = EngineConfig(**{name: value for feature in features for name, value in feature.items()})
    try:
        check_combinations(config, device)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("device", BOTH)
def test_two_features_are_refused_by_name_where_they_do_not_go_together(device: str) -> None:
    for first, second in itertools.combinations(ALL, 2):
        if first.keys() == second.keys():  # one option, which has one value
            continue
        told = [said for *pair, devices, said in REFUSED if device in devices and first in pair and second in pair]
        found = find_refusal(device, first, second)
        assert (told[0] in found) if told else not found, (first, second, found)


@pytest.mark.parametrize("device", BOTH)
def test_a_feature_alone_is_not_refused(device: str) -> None:
    assert [find_refusal(device, feature) for feature in ALL] == [""] * len(ALL)


def test_every_row_of_the_table_is_tried() -> None:
    shown = {one.told: one.told.format(config=EngineConfig(**RANKS)) for one in COMBINATIONS}
    tried = {told for told, text in shown.items() if any(said in text for *_, said in REFUSED)}
    assert tried == shown.keys()
