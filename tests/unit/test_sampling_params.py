# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters are listed once: who reads the list has all of them, with its defaults and ranges."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from blink.api.openai.sampling import build_sampling_params
from blink.api.openai.schema import CompletionBody, GenerationBody
from blink.errors import BadRequestError
from blink.region.layout import SAMPLING
from blink.sampling_params import SamplingParams
from blink.sampling_ranges import SAMPLING_RANGES
from sampling_table import meanings, render_page

_ROOT = Path(__file__).resolve().parents[2]
_TYPES = {"f": float, "i": int}


def make_params(name: str, value: float) -> SamplingParams:
    values: dict[str, Any] = {name: value}
    return SamplingParams(**values)


def test_the_page_of_sampling_parameters_is_what_the_list_says() -> None:
    assert (_ROOT / "docs" / "sampling.md").read_text() == render_page()
    assert [*meanings()] == [*SAMPLING_RANGES]


def test_every_parameter_of_the_list_is_one_of_the_struct_of_the_params_and_of_request_bodies() -> None:
    hints, defaults = get_type_hints(SamplingParams), {field.name: field.default for field in fields(SamplingParams)}
    for name, allowed in SAMPLING_RANGES.items():
        kind = _TYPES[SAMPLING[name].kind]
        assert (hints[name], defaults[name], type(allowed.default)) == (kind, allowed.default, kind)
        assert GenerationBody.model_fields[name].annotation == kind | None
        assert allowed.holds(allowed.default)


def test_a_parameter_is_named_by_its_list_its_sampler_and_the_schemas_alone() -> None:
    package = _ROOT / "src" / "blink"
    naming = {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh"} and re.search(r"\bmin_p\b", path.read_text())
    }
    schemas = {"sampling_params.py", "api/openai/schema.py"}
    options = "api/openai/ggml_options.py"  # as other APIs name them
    assert naming == {"csrc/sampler/params.h", "csrc/sampler/floor.h", *schemas, options}


@pytest.mark.parametrize("name", SAMPLING_RANGES)
def test_the_ends_of_a_range_are_taken_and_what_lies_beyond_is_refused_by_name(name: str) -> None:
    allowed = SAMPLING_RANGES[name]
    is_float = SAMPLING[name].kind == "f"
    smallest = float(np.finfo(np.float32).smallest_subnormal) if is_float else 1
    lowest = allowed.low if allowed.holds_low else allowed.low + smallest
    for value in (lowest, allowed.high):
        assert getattr(make_params(name, value), name) == value
    below = lowest - smallest if lowest == 0 or not is_float else float(np.nextafter(lowest, -np.inf))
    above = float(np.nextafter(allowed.high, np.inf)) if is_float else allowed.high + 1
    if not allowed.holds_low:
        below = allowed.low
    for value in (below, above, float("nan"), float("inf"), -float("inf")):
        with pytest.raises(BadRequestError, match=re.escape(f"{name} must be in {allowed}, got {value}.")) as caught:
            make_params(name, value)
        assert caught.value.param == name


@pytest.mark.parametrize("name", SAMPLING_RANGES)
def test_what_a_body_leaves_out_is_the_models_or_the_lists_default(name: str) -> None:
    allowed = SAMPLING_RANGES[name]

    def read(body: dict[str, Any], model: dict[str, float]) -> float:
        return getattr(build_sampling_params(CompletionBody.model_validate({"prompt": "a"} | body), model), name)

    assert read({name: allowed.default}, {name: allowed.high}) == allowed.default
    has_default = GenerationBody.model_fields[name].default is not None
    assert read({}, {name: allowed.high}) == (allowed.default if has_default else allowed.high)
    assert read({name: None}, {}) == allowed.default


def test_a_derived_copy_has_the_other_values_and_leaves_the_first_as_it_was() -> None:
    first = SamplingParams(max_tokens=None, seed=7, stop="end", logit_bias={3: 1.0}, priority=-2)
    made = first.derive(max_tokens=5, token_biases=[(1, 2.0)])
    changed = {"max_tokens": 5, "token_biases": [(1, 2.0)]}
    for each in fields(SamplingParams):
        assert getattr(made, each.name) == changed.get(each.name, getattr(first, each.name))
    assert (first.max_tokens, first.token_biases) == (None, ())


def test_a_native_value_of_the_same_name_is_the_field() -> None:
    values = SamplingParams(temperature=0.25, top_k=7, min_tokens=3, reasoning_limit=9).native_values(5)
    assert (values["temperature"], values["top_k"], values["min_tokens"], values["reasoning_limit"]) == (0.25, 7, 3, 9)
    assert values.keys() >= {*(SAMPLING.names or ())}
