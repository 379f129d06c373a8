# SPDX-License-Identifier: Apache-2.0
"""Texts that a model of random weights writes at temperature 1 under schemas of programs: whatever ends is valid.

It runs on a GPU where there is one. BLINK_TEST_TOKENIZER names a tokenizer if not the default model's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.validators
import pytest
import torch

import schema_bench
from blink import LLM, SamplingParams
from blink.config import FrontendConfig, ModelConfig
from blink.errors import BadRequestError
from blink.grammar.compiler import compile_structured
from blink.models.weights.files import default_model_path
from blink.structured_outputs import StructuredOutputsParams
from blink.text.assets import load_assets
from json_schemas import exact_number, exactly, read_programs
from tiny_model import write_tiny_model

TOKENIZER = Path(os.environ.get("BLINK_TEST_TOKENIZER") or default_model_path())
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not TOKENIZER.exists(), reason="the default model's tokenizer is not downloaded"),
]
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    has_gpu = torch.cuda.is_available()
    shape = {"hidden_size": 256, "num_attention_heads": 4} if has_gpu else {}
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), **shape)
    place: dict[str, Any] = {"device": "cuda"} if has_gpu else {"device": "cpu", "cpu_threads": 1}
    sizes = {"max_model_len": 512, "max_num_seqs": 16}
    with LLM(str(folder), load_format="dummy", tokenizer=str(TOKENIZER), **place, **sizes) as llm:
        yield llm


def find_ends() -> list[int]:
    """Return the tokens that end a string, an object or an array: single characters, the first of a vocabulary."""
    tokenizer = load_assets(FrontendConfig(model=ModelConfig(model=str(TOKENIZER)))).tokenizer
    return [token for token in range(1000) if tokenizer.token_bytes(token) in (b'"', b"}", b"]")]


def count_valid(llm: LLM, schemas: list[Any], max_tokens: int) -> tuple[int, int]:
    """Check the texts of each schema and seed that came to their end; return how many did and did not."""
    ends = dict.fromkeys(find_ends(), 6.0)  # else nearly all texts are cut within their first string
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=max_tokens,
            logit_bias=ends,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for schema in schemas
        for seed in SEEDS
    ]
    results = llm.generate(["Some JSON: "] * len(params), params, use_tqdm=False)
    num_ended = 0
    for place, result in enumerate(results):
        [output] = result.outputs
        if output.finish_reason == "length":
            continue
        assert output.finish_reason == "stop"
        schema = schemas[place // len(SEEDS)]
        of_draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        validator = of_draft(exactly(schema), format_checker=of_draft.FORMAT_CHECKER)
        validator.validate(json.loads(output.text, parse_float=exact_number))
        num_ended += 1
    return num_ended, len(results) - num_ended


def test_a_random_model_writes_what_programs_schemas_allow(llm: LLM) -> None:
    num_ended, num_cut = count_valid(llm, [program.schema for program in read_programs()], 400)
    print(f"{num_ended} texts came to their end and are valid, {num_cut} were cut")
    assert num_ended > 80


@pytest.mark.skipif(not os.environ.get("BLINK_SCHEMA_BENCH"), reason="needs JSONSchemaBench in BLINK_SCHEMA_BENCH")
def test_a_random_model_writes_what_the_bench_s_schemas_allow(llm: LLM) -> None:
    folder = Path(os.environ["BLINK_SCHEMA_BENCH"])
    schemas = [json.loads((folder / name).read_text())["schema"] for name in schema_bench.read_names()]
    num_ended, num_cut = count_valid(llm, [schema for schema in schemas if can_compile(schema)], 400)
    print(f"{num_ended} texts came to their end and are valid, {num_cut} were cut")
    assert num_ended > 600


def can_compile(schema: Any) -> bool:
    try:
        compile_structured(StructuredOutputsParams(json=schema))
    except BadRequestError:
        return False
    return True
