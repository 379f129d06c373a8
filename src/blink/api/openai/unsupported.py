# SPDX-License-Identifier: Apache-2.0
"""The request fields that other servers know and this one does not: refused unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blink.errors import BadRequestError

# Field -> the values that change nothing; None always is one.
_FIELDS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "ec_transfer_params": (),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "regex": (),
    "repetition_detection": (),
    "return_token_offsets": (False,),
    "session_id": (),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "watermarking": (),
    "web_search_options": (),
}


def reject_unsupported(fields: Mapping[str, Any]) -> None:
    """Refuse a request body that asks for something this server does not do.

    Raises:
        BadRequestError: `param` names the field.
    """
    for name in fields.keys() & _FIELDS.keys():
        value = fields[name]
        if value is not None and value not in _FIELDS[name]:
            raise BadRequestError(f"{name} is not supported by this server.", name)
    best_of = fields.get("best_of")
    if best_of is not None and best_of != (fields.get("n") or 1):
        raise BadRequestError("best_of is not supported unless it equals n.", "best_of")
