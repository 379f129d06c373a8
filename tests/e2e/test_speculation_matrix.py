# SPDX-License-Identifier: Apache-2.0
"""Every source of drafts, kind of request and temperature: the CPU engine tells the bits that it tells without drafts.

The model has random weights in a GGUF format, whose rows have the same bits beside any others. A model with its own
draft layer has float32 weights: values of its logprobs are equal, not their bits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import pytest

from benchmark_programs import load_benchmark
from blink import LLM
from blink.models.weights.files import default_model_path
from blink.models.weights.source import read_spec
from blink.request.planner import Planner
from eagle_heads import draw_head, write_head
from mtp_layers import write_clockwork
from test_speculation_equality import (
    FEW_TOKENS,
    KINDS,
    METHODS,
    PROMPTS,
    TEMPERATURES,
    VOCAB,
    ask_for,
    load,
    outcomes_of,
)
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model's tokenizer is not downloaded"),
]
TOKENIZER = str(default_model_path())
FORMS = ("schema", "tools")
GRAMMAR = {"method": "ngram", "prompt_lookup_min": 16, "prompt_lookup_max": 16}  # no text has so long a match
Tokens = list[int]


def tell_truth(answer: Tokens) -> Tokens:
    """Predict what is answered."""
    return answer


def lie(answer: Tokens) -> Tokens:
    """Predict another token at each third place."""
    return [token if at % 3 else FEW_TOKENS[token % len(FEW_TOKENS)] + 1 for at, token in enumerate(answer, 1)]


def guess(answer: Tokens) -> Tokens:
    """Predict the answer's tokens in any order."""
    return random.Random(len(answer)).choices(answer, k=2 * len(answer)) if answer else []


PREDICTIONS: Mapping[str, Callable[[Tokens], Tokens]] = {"oracle": tell_truth, "liar": lie, "random": guess}
DRAFTERS = (*METHODS, "grammar", "eagle3", *PREDICTIONS, "mtp")


@dataclass
class Side:
    """A model without drafts and with each source of them, and what it answers without."""

    plain: LLM
    drafting: Mapping[str, LLM]
    is_exact: bool
    known: dict[tuple[str, float, int], list[list[Any]]] = field(default_factory=dict[Any, Any])

    def expect(self, kind: str, temperature: float, prompts: Sequence[str]) -> list[list[Any]]:
        """Return what is answered without drafts."""
        key = kind, temperature, len(prompts)
        if key not in self.known:
            asked, most = ask_for(kind)
            self.known[key] = outcomes_of(self.plain, [*prompts], temperature, asked, most)
        return self.known[key]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    folder = tmp_path_factory.mktemp("matrix")
    spec, model = read_spec(write_tiny_model(folder, hidden_size=64, num_hidden_layers=2)), folder / "model.gguf"
    load_benchmark("gguf_header").write_header(spec, model, gguf.GGMLQuantizationType.Q8_0)
    head = write_head(folder / "head", draw_head(VOCAB, FEW_TOKENS, seed=4, target_hidden=64), (0, 1, 1))
    configs: dict[str, Any] = {**METHODS, "grammar": GRAMMAR, "eagle3": {"method": "eagle3", "model": str(head)}}
    yield from open_side(model, configs, is_exact=True)


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    model = write_clockwork(tmp_path_factory.mktemp("layered"), VOCAB, noise=0.022)
    yield from open_side(model, {"mtp": {"method": "mtp", "num_speculative_tokens": 3}}, is_exact=False)


def open_side(model: Path, configs: Mapping[str, Any], *, is_exact: bool) -> Iterator[Side]:
    options: dict[str, Any] = {"tokenizer": TOKENIZER, **({"load_format": "dummy"} if is_exact else {})}
    plain = load(str(model), **options)
    drafting = {name: load(str(model), **options, speculative_config=json.dumps(one)) for name, one in configs.items()}
    yield Side(plain, drafting, is_exact)
    for llm in (plain, *drafting.values()):
        llm.close()


def check(side: Side, drafter: str, kind: str, temperature: float, prompts: Sequence[str]) -> None:
    """Compare what requests tell with drafts and without."""
    expected = side.expect(kind, temperature, prompts)
    asked, most = ask_for(kind)
    if predict := PREDICTIONS.get(drafter):
        predictions = [predict(first[1]) for [first, *_] in expected]
        with mock.patch.object(Planner, "_predict", side_effect=predictions):  # requests are planned in their order
            found = outcomes_of(side.drafting["ngram"], [*prompts], temperature, asked, most)
    else:
        found = outcomes_of(side.drafting[drafter], [*prompts], temperature, asked, most)
    if side.is_exact:
        assert found == expected, (kind, temperature)
        return
    for choices, others in zip(found, expected, strict=True):
        for one, other in zip(choices, others, strict=True):
            assert one[:2] + one[3:] == other[:2] + other[3:], (kind, temperature)
            for place, known in zip(one[2], other[2], strict=True):
                assert place == pytest.approx(known, abs=1e-4), (kind, temperature)


def check_drafter(request: pytest.FixtureRequest, drafter: str, cells: Sequence[tuple[str, float]], every: int) -> None:
    """Check cells of the matrix, with one prompt of so many; some drafts have to be made, and be kept."""
    side: Side = request.getfixturevalue("layered" if drafter == "mtp" else "exact")
    llm = side.drafting["ngram" if drafter in PREDICTIONS else drafter]
    before = llm.stats()
    for kind, temperature in cells:
        check(side, drafter, kind, temperature, PROMPTS[::every])
    after = llm.stats()
    drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    assert drafted > accepted > 10 or (drafter == "oracle" and accepted > 10), (drafted, accepted)
    assert side.plain.stats()["draft_tokens"] == 0


def cells_of(drafter: str) -> list[tuple[str, float]]:
    kinds = FORMS if drafter == "grammar" else KINDS  # grammars draft for forms alone
    return [(kind, temperature) for kind in kinds for temperature in TEMPERATURES]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_source_of_drafts_changes_an_answer(request: pytest.FixtureRequest, drafter: str) -> None:
    """Each kind at one temperature."""
    cells = cells_of(drafter)
    check_drafter(request, drafter, cells if drafter == "grammar" else cells[::4], every=20)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_source_of_drafts_changes_any_answer_of_the_matrix(request: pytest.FixtureRequest, drafter: str) -> None:
    """40 prompts, each kind, each temperature."""
    check_drafter(request, drafter, cells_of(drafter), every=1)
