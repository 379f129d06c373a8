# SPDX-License-Identifier: Apache-2.0
"""Blink serves large language models with no host CPU on the token path. Importing it loads nothing heavy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blink.llm import LLM
    from blink.sampling_params import SamplingParams
    from blink.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]

_MODULES = {
    "LLM": "blink.llm",
    "SamplingParams": "blink.sampling_params",
    "StructuredOutputsParams": "blink.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'blink' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
