# SPDX-License-Identifier: Apache-2.0
"""The families of models that Blink runs, a file for each maker's. Their names stand nowhere else. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from blink.errors import ConfigError
from blink.models.families import gemma, gpt_oss, granite, llama, mistral, olmo2, opt, phi3, qwen
from blink.models.families.base import Family

FAMILIES: Mapping[str, Family] = {
    **llama.FAMILIES,
    **qwen.FAMILIES,
    **mistral.FAMILIES,
    **gemma.FAMILIES,
    **phi3.FAMILIES,
    **olmo2.FAMILIES,
    **granite.FAMILIES,
    **gpt_oss.FAMILIES,
    **opt.FAMILIES,
}
GGUF_NAMES: Mapping[str, str] = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
_OTHER_NAMES = {other: name for name, family in FAMILIES.items() for other in family.also_known_as}


def find_architecture(model_type: str) -> str:
    """Return the name in FAMILIES of a config's model_type, which may be that of a model with more than text."""
    return _OTHER_NAMES.get(model_type, model_type)


def not_supported(place: str, shown: str) -> ConfigError:
    """Return the error for a model of another family."""
    known = ", ".join(FAMILIES)
    return ConfigError(f"{place}: model type {shown} is not supported; Blink runs {known}.")
