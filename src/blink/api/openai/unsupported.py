# SPDX-License-Identifier: Apache-2.0
"""The request fields that other servers know and this one does not: refused unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blink.errors import BadRequestError

# Field -> the values that change nothing; None always is one. Those of other servers than vLLM and OpenAI have another
# name here, which the message tells.
_NAMES = {
    "ebnf": "structured_outputs.grammar",
    "format": "response_format",
    "n_predict": "max_tokens",
    "num_ctx": "--max-model-len of the server",
    "options": "the fields themselves",
    "repeat_penalty": "repetition_penalty",
    "json_schema": "response_format",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
}
_FIELDS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "ebnf": (),
    "ec_transfer_params": (),
    "format": (),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "modalities": (["text"],),
    "n_predict": (),
    "num_ctx": (),
    "options": ({},),
    "prediction": (),
    "prompt_embeds": (),
    "regex": (),
    "repeat_penalty": (1, 1.0),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "watermarking": (),
    "web_search_options": (),
}
_OF_CHATS = {"kv_transfer_params", "prediction"}  # whose body says what of them is known
_UNKNOWN, _UNKNOWN_TO_CHATS = _FIELDS.keys(), _FIELDS.keys() - _OF_CHATS


def reject_unsupported(fields: Mapping[str, Any]) -> None:
    """Refuse a request body that asks for something this server does not do.

    Raises:
        BadRequestError: `param` names the field.
    """
    for name in fields.keys() & (_UNKNOWN_TO_CHATS if "messages" in fields else _UNKNOWN):
        value = fields[name]
        if value is not None and value not in _FIELDS[name]:
            instead = f"; use {_NAMES[name]}" if name in _NAMES else ""
            raise BadRequestError(f"{name} is not supported by this server{instead}.", name)
