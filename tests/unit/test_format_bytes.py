# SPDX-License-Identifier: Apache-2.0
"""Golden table: what each number format takes of each model, by the description alone, and of single matrices.

`PYTHONPATH=tests/shared python tests/unit/test_format_bytes.py` writes the table anew.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import blink.models
from blink.cli import model_fit
from blink.formats.experts import PackedExperts
from blink.formats.fp8 import quantize_fp8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import pack
from blink.formats.schemes import GROUP, FormatId
from blink.models.spec import ModelSpec
from blink.models.weights.gguf_file import GgufTensor
from blink.models.weights.source import read_spec
from gguf_blocks import KINDS
from model_families import FAMILIES, SMALL
from mxfp4_checkpoints import QUANTIZATION
from quantized_checkpoints import CONFIG, SCHEMES

TABLE = Path(__file__).with_name("format_bytes.json")
CONFIGS = Path(blink.models.__file__).parent / "configs"
FORMATS: Mapping[str, dict[str, Any] | None] = {"none": None, **SCHEMES, "mxfp4": QUANTIZATION}
_FACTS = ("bits", "group", "experts_only", "in_arrays", "weight_bytes", "kept_bytes", "title")


def list_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the description of each model: the committed ones, and those of the tests."""
    for path in sorted(CONFIGS.iterdir()):
        yield path.name, json.loads((path / "config.json").read_text())
    yield "small", CONFIG
    for name, changes in FAMILIES.items():
        values = SMALL | changes
        yield f"small {name}", AutoConfig.for_model(**values).to_dict()


def read(config: dict[str, Any], scheme: str, folder: Path) -> ModelSpec:
    """Describe a model in a number format."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    quantized = {} if FORMATS[scheme] is None else {"quantization_config": FORMATS[scheme]}
    (folder / "config.json").write_text(json.dumps(plain | quantized))
    return read_spec(folder)


def count(spec: ModelSpec) -> list[int]:
    """Return a model's parameters, those in matrices, and bytes on a GPU and on a CPU: in all, and read for a token."""
    on_gpu = model_fit.count_weights(spec, 2, stays_quantized=True)
    on_cpu = model_fit.count_weights(spec, 4, stays_quantized=False)
    numbers = [spec.num_parameters, spec.num_matrix_weights]
    return [*numbers, on_gpu.total, on_gpu.read, on_cpu.total, on_cpu.read]


def list_facts(spec: ModelSpec) -> list[list[Any] | None]:
    """Return what is known of the matrices' format and of the output layer's."""
    schemes = (spec.quantization, spec.output_quantization)
    return [None if one is None else [getattr(one, fact) for fact in _FACTS] for one in schemes]


def list_packed() -> dict[str, int]:
    """Return the bytes of matrices as a GPU keeps them."""
    values, groups = torch.zeros(256, 512), 512 // GROUP
    rows = quantize_fp8(values)
    codes, zeros = torch.zeros(256, 512, dtype=torch.uint8), torch.zeros(256, groups, dtype=torch.uint8)
    found = {
        "fp8 rows": pack([rows]).nbytes,
        "fp8 groups": pack([QuantizedMatrix(rows.values, torch.ones(256, groups))]).nbytes,
        "int4": pack([QuantizedMatrix(codes, torch.ones(256, groups), zeros)]).nbytes,
    }
    for name in ("FP8", "INT4", "MXFP4"):
        packed = PackedExperts.allocate(FormatId[name], (3, 64, 416))
        scales = 0 if packed.row_scales is None else packed.row_scales.nbytes
        found[f"experts {name}"] = packed.values.nbytes + packed.groups.nbytes + scales
    return found


def list_blocks() -> dict[str, list[int]]:
    """Return the bytes of matrices in GGUF's formats on a GPU, of whole units of columns and of others."""
    shapes = ((256, 512), (3, 64, 768), (7, 256))
    return {kind.name: [GgufTensor(shape, kind, 0, 0).gpu_bytes for shape in shapes] for kind in KINDS}


def collect(folder: Path) -> dict[str, Any]:
    """Return the whole table."""
    models = {
        name: {scheme: count(read(config, scheme, folder)) for scheme in FORMATS} for name, config in list_configs()
    }
    facts = {scheme: list_facts(read(CONFIG, scheme, folder)) for scheme in FORMATS}
    return {"models": models, "facts": facts, "packed": list_packed(), "blocks": list_blocks()}


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


@pytest.mark.parametrize(("name", "config"), list(list_configs()), ids=[name for name, _ in list_configs()])
def test_a_model_takes_as_much_as_before(
    name: str, config: dict[str, Any], table: dict[str, Any], tmp_path: Path
) -> None:
    expected = table["models"][name]
    assert {scheme: count(read(config, scheme, tmp_path)) for scheme in FORMATS} == expected


def test_the_table_has_every_model(table: dict[str, Any]) -> None:
    assert list(table["models"]) == [name for name, _ in list_configs()]


def test_formats_and_matrices_are_as_before(table: dict[str, Any], tmp_path: Path) -> None:
    assert {scheme: list_facts(read(CONFIG, scheme, tmp_path)) for scheme in FORMATS} == table["facts"]
    assert list_packed() == table["packed"]
    assert list_blocks() == table["blocks"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        TABLE.write_text(json.dumps(collect(Path(made)), separators=(",", ":")) + "\n")
