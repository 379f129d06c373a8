# SPDX-License-Identifier: Apache-2.0
"""An engine in this process that publishes events of its KV cache, as a router meets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from blink.errors import ConfigError
from cache_index import CacheIndex
from kv_router import check_predictions
from kv_subscriber import Subscriber
from model_families import save_model
from processes import wait_for

SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT = [5, 9, 30, 31, 32] * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("events") / "model"
    save_model("llama-3.1", folder)
    return str(folder)


def test_a_router_knows_the_blocks_of_prompts_and_answers_of_an_llm(model: str, tmp_path: Path) -> None:
    ends = {"endpoint": f"ipc://{tmp_path}/a", "replay_endpoint": f"ipc://{tmp_path}/b"}
    settings = {"enable_kv_cache_events": True, **ends}
    with LLM(model, num_gpu_blocks_override=64, kv_events_config=settings, **SIZES) as llm:
        subscriber = Subscriber(*ends.values())
        answer = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

        def follow() -> CacheIndex:
            index = CacheIndex()
            for _, batch in subscriber.replay(0):
                index.apply(batch.events)
            return index

        whole = [*PROMPT, *answer]
        wait_for(lambda: len(follow().blocks) == (len(whole) - 1) // 16, 30)
        told = [token for _, tokens in follow().blocks.values() for token in tokens]
        assert told == whole[: len(told)]
        assert llm.reset_prefix_cache()
        wait_for(lambda: not follow().blocks, 30)
        subscriber.close()


def test_an_llm_refuses_events_that_blink_does_not_have(model: str) -> None:
    with pytest.raises(ConfigError, match="publisher must be one of"):
        LLM(model, kv_events_config={"enable_kv_cache_events": True, "publisher": "kafka"}, **SIZES)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_router_predicts_each_hit_in_a_cache_that_is_too_small(
    ranks: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_predictions(Path(model), "cpu", monkeypatch, 30, tensor_parallel_size=ranks, cpu_threads=2)
