# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/models.md, made of the families' registry and of what reads it: python tests/shared/model_page.py.

A table stands between two comments, `<!-- made: NAME -->` and `<!-- end -->`; the text around it is written by hand. A
new family needs its row in the registry and its small model in model_families.py: nothing here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from blink.errors import ConfigError
from blink.models.families import FAMILIES
from blink.models.families.base import Family
from blink.models.spec import ModelSpec
from blink.models.weights.config_json import read_config_json
from blink.quantize.differentiable import check_differentiable
from model_families import FAMILIES as SMALL_MODELS
from model_families import SMALL

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_REGION = re.compile(r"(<!-- made: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_NONE = "no"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a config.json may say that Blink refuses, and why; `models` is the family, empty for all."""

    changes: dict[str, Any]
    why: str
    models: str = ""


REFUSALS = (
    Refusal({"model_type": "mamba"}, "a family is run when its small model gives the tokens of transformers"),
    Refusal({"quantization_config": {"quant_method": "bitsandbytes"}}, "no kernel reads it"),
    Refusal({"hidden_act": "gelu"}, "no family here has it"),
    Refusal({"mlp_bias": True}, "the MLP kernels add no bias"),
    Refusal({"use_bidirectional_attention": True}, "the KV cache holds earlier tokens alone"),
    Refusal({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "its frequencies change with the length"),
    Refusal({"attn_output_gate": False}, "no published model is without the gate", "qwen3_5_text"),
    Refusal({"mamba_ssm_dtype": "bfloat16"}, "16 bits lose what decays slowly", "qwen3_5_text"),
    Refusal({"linear_conv_kernel_dim": 3}, "the kernels have four inputs", "qwen3_5_text"),
    Refusal({"swiglu_limit": 5.0}, "the kernel has the published limit", "gpt_oss"),
)


def render_page(text: str) -> str:
    """Return the page with its tables made anew."""
    tables = {"families": _render_families, "refusals": _render_refusals}
    return _REGION.sub(lambda match: match[1] + "\n" + tables[match[2]]() + "\n" + match[4], text)


def _render_families() -> str:
    head = "| family | `model_type` | `architectures` | GGUF | `--tune` | small models of the tests |"
    return "\n".join([head, "|---|---|---|---|---|---|", *(_row(name, each) for name, each in FAMILIES.items())]) + "\n"


def _row(name: str, family: Family) -> str:
    models = [model for model, values in SMALL_MODELS.items() if values["model_type"] == name]
    cells = (
        family.title,
        _list([name, *family.also_known_as]),
        _list(_classes([name, *family.also_known_as])),
        _gguf(name, family),
        "yes" if _can_be_tuned(models) else _NONE,
        _list(models),
    )
    return f"| {' | '.join(cells)} |"


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _classes(model_types: list[str]) -> list[str]:
    """Return transformers' classes of models that write text, by which files name their architecture."""
    tables = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    found = [table[each] for table in tables for each in model_types if each in table]
    return list(dict.fromkeys(found))


def _gguf(name: str, family: Family) -> str:
    as_mixture = [other.gguf for other in FAMILIES.values() if other.gguf_mixture == name or name in other.gguf_others]
    return _list([family.gguf] if family.gguf else as_mixture) or _NONE


def _can_be_tuned(models: list[str]) -> bool:
    """Tell whether `blink quantize --tune` takes one of a family's small models."""
    for model in models:
        try:
            check_differentiable(_read(SMALL_MODELS[model]))
        except ConfigError:
            continue
        return True
    return False


def _render_refusals() -> str:
    lines = ["| config.json says | of | Blink says | because |", "|---|---|---|---|"]
    for refusal in REFUSALS:
        models = FAMILIES[refusal.models].title if refusal.models else "all"
        said = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in refusal.changes.items())
        lines.append(f"| {said} | {models} | {explain(refusal)} | {refusal.why} |")
    return "\n".join(lines) + "\n"


def explain(refusal: Refusal) -> str:
    """Return what is said of a model with the changes, but for the file's name and the advice.

    Raises:
        AssertionError: it is not refused.
    """
    name = next(name for name, each in SMALL_MODELS.items() if each["model_type"] == (refusal.models or "llama"))
    try:
        _read(SMALL_MODELS[name], refusal.changes)
    except ConfigError as error:
        return error.message.rpartition("config.json: ")[2].partition(";")[0].removeprefix("quantization_config: ")
    raise AssertionError(f"{refusal.changes} is not refused")


def _read(values: dict[str, Any], changes: dict[str, Any] | None = None) -> ModelSpec:
    config = AutoConfig.for_model(**{**SMALL, **values}).to_dict() | (changes or {})
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return read_config_json(Path(folder))


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text()))
