# SPDX-License-Identifier: Apache-2.0
"""The CPU engine's steps in segments: a real model, driven pass by pass, whose paused steps change no token."""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from blink.config import EngineConfig, ModelConfig
from blink.engine.costs import measure_costs
from blink.engine.cpu import CpuEngine
from blink.engine.geometry import graph_sizes
from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.kernels.batch import Batch, Header
from blink.link.queue_pair import QueuePair, Submission
from blink.link.shm import ShmLink
from blink.region.layout import CqeKind, StepClass, StepKind, StepResult
from blink.region.memory import publish_region
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from tiny_model import write_tiny_model

LAYERS = 6
LENGTHS = (60, 37, 5, 90, 18)
NEW_TOKENS = 12


class SteppedEngine(CpuEngine):
    """A CPU engine that a test steps by hand."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        publish_region(self._region, config.region)
        self.pair = QueuePair(ShmLink(self._region, 0))
        self.pair.request_attach()
        self.now = 10**9
        self.pass_once()
        self.pair.start()
        self.paused = 0
        self.logprobs: dict[int, list[float]] = {}  # logprobs of prompts' tokens
        starts, text = self._batch.token_starts.tolist(), bytes(self._batch.token_text.tolist())
        self.vocabulary = [text[start:end] for start, end in itertools.pairwise(starts)]

    def pass_once(self) -> StepResult:
        """Run a pass, and what it launches."""
        self.now += 10**6
        result = StepResult(lib.blink_step(self._state.address, self.now))
        broken = lib.blink_check_integrity(self._state.address)
        assert broken is None, broken.decode()
        if result == StepResult.LAUNCHED:
            kind = StepKind(int(self._state.struct["in_flight_kind"]))
            self.paused += kind == StepKind.WHOLE and int(self._state.struct["num_segments"]) > 0
            assert self._compute(kind) == 0
            output, header = (self._array(kind.array(name), torch.int64) for name in ("output", "header"))
            output[0] = header[2]
        return result

    def submit(
        self,
        prompt: np.ndarray,
        *,
        best_effort: bool,
        automaton: Automaton | None = None,
        prompt_logprobs: int | None = None,
    ) -> int:
        params = SamplingParams(
            max_tokens=NEW_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            best_effort=best_effort,
            prompt_logprobs=prompt_logprobs,
        )
        return self.pair.submit(Submission(prompt, (), 0, b"", automaton=automaton), params)

    def trace(self) -> np.ndarray:
        return self._region.trace()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppedEngine]:
    path = write_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS, vocab_size=512)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = EngineConfig(
        model=ModelConfig(model=str(path), load_format="dummy", max_model_len=128),
        region=f"segments-{os.getpid()}-{secrets.token_hex(3)}",
        num_queue_pairs=1,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=40,
        segment_ms=0.001,
        enable_prefix_caching=False,
    )
    engine = SteppedEngine(config)
    yield engine
    engine.remove_region()


def test_a_new_engine_has_measured_its_steps(engine: SteppedEngine) -> None:
    costs = engine._array("costs", torch.int64).view(-1, 2)[:, 0]
    assert (costs >= 1000).all() and (costs < 10**10).all()
    assert (costs.diff()[: int(engine._geometry["num_decode_graphs"]) - 1] >= 0).all()


def prompt_of(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 512, length).astype(np.int32)


def run(engine: SteppedEngine, found: dict[int, list[int]], sequences: list[int]) -> None:
    """Step until all have ended, and take what they deliver."""
    for _ in range(2000):
        for completion in engine.pair.drain():
            if completion["kind"] == CqeKind.PROMPT_LOGPROB:
                engine.logprobs.setdefault(int(completion["sequence"]), []).append(float(completion["logprob"]))
            if completion["kind"] == CqeKind.TOKEN:
                found.setdefault(int(completion["sequence"]), []).append(int(completion["token"]))
        if all(len(found.get(sequence, [])) == NEW_TOKENS for sequence in sequences):
            return
        engine.pair.renew_lease()
        engine.pass_once()
    raise AssertionError("they do not end")


def test_paused_and_resumed_sequences_yield_what_they_yield_alone(engine: SteppedEngine) -> None:
    alone: list[list[int]] = []
    for length in LENGTHS:
        found: dict[int, list[int]] = {}
        one = engine.submit(prompt_of(length), best_effort=False)
        run(engine, found, [one])
        alone.append(found[one])
    assert engine.paused == 0 and not engine.trace()["num_segments"].any()

    found = {}
    slow = [engine.submit(prompt_of(length), best_effort=True) for length in LENGTHS[:3]]
    fast: list[int] = []
    for length in LENGTHS[3:]:
        for _ in range(LAYERS // 2 + 1):  # into the middle of a step
            engine.pass_once()
        fast.append(engine.submit(prompt_of(length), best_effort=False))
    run(engine, found, [*slow, *fast])
    assert [found[sequence] for sequence in [*slow, *fast]] == alone
    assert engine.paused >= 2
    trace = engine.trace()
    assert set(trace["num_segments"].tolist()) == {0, LAYERS}
    assert (trace["step_class"][trace["num_best_effort_rows"] > 0] != StepClass.URGENT).all()


def test_constrained_rows_of_paused_steps_keep_to_their_form_and_prompts_are_scored_beside_them(
    engine: SteppedEngine,
) -> None:
    forms = [compile_structured(StructuredOutputsParams(regex=regex)) for regex in ("([0-9][a-f]){6,}", "(foo|bar)+")]
    requests = [(60, forms[0], None), (37, forms[1], None), (18, forms[1], None), (90, None, 0)]

    def play(*, together: bool) -> tuple[list[list[int]], list[float]]:
        found: dict[int, list[int]] = {}
        sequences: list[int] = []
        for i, (length, automaton, num_top) in enumerate(requests):
            best_effort = together and i < 2
            one = engine.submit(
                prompt_of(length), best_effort=best_effort, automaton=automaton, prompt_logprobs=num_top
            )
            sequences.append(one)
            if not together:
                run(engine, found, [one])
            for _ in range(LAYERS // 2 + 1 if together and i > 0 else 0):
                engine.pass_once()
        run(engine, found, sequences)
        return [found[sequence] for sequence in sequences], engine.logprobs[sequences[-1]]

    alone, logprobs = play(together=False)
    before = engine.paused
    together, logprobs_beside = play(together=True)
    assert together == alone
    assert engine.paused >= before + 2
    assert len(logprobs) == 89
    np.testing.assert_allclose(logprobs_beside, logprobs, rtol=1e-3, atol=1e-3)
    texts = [b"".join(engine.vocabulary[token] for token in tokens).decode() for tokens in together[:3]]
    assert re.fullmatch("([0-9][a-f]){6}", texts[0])
    assert all(re.fullmatch("(foo|bar){4}", text) for text in texts[1:])
    trace = engine.trace()
    assert not trace["num_segments"][trace["graph"] >= engine._geometry["first_scoring_graph"]].any()


def test_the_table_takes_what_was_measured_and_continues_its_line(engine: SteppedEngine) -> None:
    geometry = engine._geometry.copy()
    geometry["segment_ns"] = 10**9
    sizes, asked = graph_sizes(geometry), list[tuple[int, int, int]]()
    batch = Batch.allocate(max_tokens=64, max_rows=4, num_slots=8, max_blocks=8, max_model_len=128)

    def time_step(graph: int) -> float:
        """Take 1 s, 0.1 s for each token and 1 ms for each token of context beyond the row's own."""
        tokens = int(batch.header[Header.NUM_TOKENS])
        asked.append((graph, tokens, int(batch.header[Header.NUM_ROWS])))
        assert tokens == sizes[graph][0] and int(batch.query_starts[asked[-1][2]]) == tokens
        return 1 + 0.1 * tokens + 0.001 * (int(batch.context_lens.sum()) - tokens)

    costs = measure_costs(geometry, batch, time_step, num_layers=LAYERS, budget=3)
    for cost, (tokens, _) in zip(costs, sizes, strict=True):
        assert abs(int(cost["base_ns"]) / 1e9 - (1 + 0.1 * tokens)) < 1e-6
    num_plain = int(geometry["first_scoring_graph"])
    assert len({graph for graph, *_ in asked}) < num_plain, "the budget ended before all were measured"
    assert abs(int(costs[0]["kv_ps"]) - 10**9) < 10**4
    assert costs["num_segments"].tolist() == [1, 1, 2, 3, 4, 4, 5, 6, 6, *[1] * 6], (
        "graphs of prompt logprobs are not cut"
    )
    assert not any(part.any() for part in (batch.header, batch.context_lens, batch.params, batch.block_tables))


def test_a_short_budget_still_measures_what_more_tokens_take(engine: SteppedEngine) -> None:
    geometry, asked = engine._geometry.copy(), set[int]()
    sizes = graph_sizes(geometry)
    batch = Batch.allocate(max_tokens=64, max_rows=4, num_slots=8, max_blocks=8, max_model_len=128)

    def time_step(graph: int) -> float:
        asked.add(graph)
        return 0.1 * max(8, sizes[graph][0])

    costs = measure_costs(geometry, batch, time_step, num_layers=LAYERS, budget=0.05)
    assert [sizes[graph][0] for graph in sorted(asked)] == [1, 8, 24]
    for cost, (tokens, _) in zip(costs, sizes, strict=True):
        assert abs(int(cost["base_ns"]) / 1e9 - 0.1 * max(8, tokens)) < 1e-6
