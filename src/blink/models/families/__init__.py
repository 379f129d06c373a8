# SPDX-License-Identifier: Apache-2.0
"""The families of models that Blink runs, a file for each maker's. Their names stand nowhere else. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from blink.errors import ConfigError
from blink.models.families import (
    deepseek,
    ernie,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    llama,
    llama4,
    minimax,
    mistral,
    olmo,
    opt,
    phi3,
    qwen,
    seed_oss,
    smollm3,
)
from blink.models.families.base import Family

FAMILIES: Mapping[str, Family] = {
    **llama.FAMILIES,
    **qwen.FAMILIES,
    **mistral.FAMILIES,
    **gemma.FAMILIES,
    **gemma4.FAMILIES,
    **phi3.FAMILIES,
    **olmo.FAMILIES,
    **granite.FAMILIES,
    **gpt_oss.FAMILIES,
    **opt.FAMILIES,
    **smollm3.FAMILIES,
    **seed_oss.FAMILIES,
    **ernie.FAMILIES,
    **llama4.FAMILIES,
    **glm.FAMILIES,
    **deepseek.FAMILIES,
    **minimax.FAMILIES,
}
GGUF_NAMES: Mapping[str, str] = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
_OTHER_NAMES = {other: name for name, family in FAMILIES.items() for other in family.also_known_as}


def find_architecture(model_type: str, text_type: str = "") -> str:
    """Return the name in FAMILIES of a config's model_type, which may be that of a model with more than text.

    text_type: the model_type of its text part, if it has one that says so.
    """
    if text_type in FAMILIES and model_type in FAMILIES[text_type].also_known_as:
        return text_type
    return _OTHER_NAMES.get(model_type, model_type)


def not_supported(place: str, shown: str) -> ConfigError:
    """Return the error for a model of another family."""
    known = ", ".join(FAMILIES)
    return ConfigError(f"{place}: model type {shown} is not supported; Blink runs {known}.")
