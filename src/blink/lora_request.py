# SPDX-License-Identifier: Apache-2.0
"""LoRARequest: an adapter for a call of `LLM`, and how calls give them."""

from __future__ import annotations

from dataclasses import dataclass

from blink.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for a call of `LLM`, with the fields of vLLM's.

    Args:
        lora_name: what outputs show.
        lora_int_id: taken; adapters are told apart by what they contain.
        lora_path: the folder with the adapter's files.
        load_inplace: whether the files are read again although the adapter is in memory.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1 or not self.lora_path:
            raise BadRequestError("A LoRARequest needs a lora_int_id from 1 on, and a lora_path.", "lora_request")


def read_lora(given: object) -> LoRARequest | None:
    """Return the adapter that a call of one prompt gives; None: it gives none.

    Raises:
        BadRequestError: it is neither.
    """
    if not isinstance(given, LoRARequest | None):
        raise BadRequestError("lora_request is a LoRARequest.", "lora_request")
    return given


def read_loras(given: object, count: int) -> list[LoRARequest | None]:
    """Return the adapter of each prompt of a call: one for all, or a list with one or None for each.

    Raises:
        BadRequestError: it is none of these.
    """
    each: list[object] = list(given) if isinstance(given, list | tuple) else [given] * count
    found = [one for one in each if isinstance(one, LoRARequest | None)]
    if not len(found) == len(each) == count:
        raise BadRequestError("lora_request is a LoRARequest, or a list with one for each prompt.", "lora_request")
    return found
