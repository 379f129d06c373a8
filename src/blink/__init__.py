# SPDX-License-Identifier: Apache-2.0
"""Blink serves large language models with no host CPU on the token path. Importing it loads nothing heavy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blink.async_llm import AsyncLLM, AsyncLLMEngine
    from blink.beam_search_params import BeamSearchParams
    from blink.llm import LLM
    from blink.lora_request import LoRARequest
    from blink.offline.options import AsyncEngineArgs, EngineArgs
    from blink.outputs import CompletionOutput, RequestOutput
    from blink.request.source import PromptType, TextPrompt, TokensPrompt
    from blink.request.vectors import PoolingParams
    from blink.sampling_params import GuidedDecodingParams, RequestOutputKind, SamplingParams
    from blink.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "LoRARequest",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_MODULES = {
    "AsyncEngineArgs": "blink.offline.options",
    "AsyncLLM": "blink.async_llm",
    "AsyncLLMEngine": "blink.async_llm",
    "BeamSearchParams": "blink.beam_search_params",
    "CompletionOutput": "blink.outputs",
    "EngineArgs": "blink.offline.options",
    "GuidedDecodingParams": "blink.sampling_params",
    "LLM": "blink.llm",
    "LoRARequest": "blink.lora_request",
    "PoolingParams": "blink.request.vectors",
    "PromptType": "blink.request.source",
    "RequestOutput": "blink.outputs",
    "RequestOutputKind": "blink.sampling_params",
    "SamplingParams": "blink.sampling_params",
    "StructuredOutputsParams": "blink.structured_outputs",
    "TextPrompt": "blink.request.source",
    "TokensPrompt": "blink.request.source",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'blink' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
