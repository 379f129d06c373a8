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
    "prompt_logprobs": (),
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


def reject_tools(fields: Mapping[str, Any]) -> None:
    """Refuse tool calls: a chat may list tools for its template, but only with tool_choice "none"."""
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise BadRequestError("Forced tool calls are not supported by this server.", "tool_choice")
    if tools and choice != "none":
        raise BadRequestError('Tool calls are not supported by this server; set tool_choice to "none".', "tools")
    if choice == "auto" and not tools:
        raise BadRequestError("When using `tool_choice`, `tools` must be set.", "tool_choice")
