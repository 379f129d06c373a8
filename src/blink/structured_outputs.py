# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of the form of its text: vLLM's structured outputs, and calls of tools inside of free text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blink.errors import BadRequestError

MAX_CHOICES = 4096
MAX_TAGS = 256
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Describe how an object's members are written one by one, each as `begin`, its value and `end`.

    Args:
        begin: with %s for the member's name.
        end: behind a value; it may have %s for the member's name.
        separator: between two members.
        text: what stands around a string's text; None: strings are JSON, as all other values.
        before_json: before what is no string. If neither this nor `text` has anything, the text itself tells strings
            from other values.
        stops: what no string's text may hold.
        is_python: true, false and null are Python's.
    """

    begin: str
    end: str = ""
    separator: str = ""
    text: tuple[str, str] | None = ("", "")
    before_json: str = ""
    stops: tuple[str, ...] = ()
    is_python: bool = False

    @property
    def tells_texts(self) -> bool:
        """Say whether something else than a text tells it from other values."""
        return self.text is None or bool(self.text[0] or self.before_json)


@dataclass(frozen=True, slots=True)
class Tag:
    """A text, a JSON value of a schema or the members of one, and a text behind it."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str
    parameters: Parameters | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTag:
    """Describe texts with tagged JSON inside.

    Args:
        tags: what each may be.
        trigger: how all of their beginnings begin. The text is free until it comes, and behind a tag's end; without a
            trigger the text is tags alone.
        separator: between two tags, where there is no trigger.
        prefix: before the first tag, where there is no trigger.
        suffix: behind the last tag, where there is no trigger.
        max_tags: the most tags; None: any number. With a trigger, 1 or None.
    """

    tags: Sequence[Tag]
    trigger: str = ""
    separator: str = ""
    prefix: str = ""
    suffix: str = ""
    max_tags: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.tags) <= MAX_TAGS:
            raise BadRequestError(f"structural_tag must have 1 to {MAX_TAGS} tags.", "structured_outputs")
        if not all(tag.begin.startswith(self.trigger) for tag in self.tags):
            raise BadRequestError("Each tag of a structural_tag must begin with its trigger.", "structured_outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Describe replies in gpt-oss' format: reasoning, as much as there is, and then a call of a tool or an answer.

    Args:
        calls: the schemas of calls' arguments by their recipients.
        may_answer: the reply may be an answer; its text has the form that is given beside, any if there is none.
        begins_in: the channel of the message that the prompt leaves open; empty: it leaves none.
    """

    calls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, "Mapping[str, Any]"])
    may_answer: bool = True
    begins_in: Literal["", "analysis", "final"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Describe the form of a text by one of vLLM's ways.

    Args:
        json: a JSON schema, as an object or as its text.
        regex: a pattern of the whole text.
        choice: the texts to choose from.
        grammar: an EBNF grammar, as GGML's; its root rule is the text.
        json_object: any JSON object.
        structural_tag: JSON inside of texts, for calls of tools; a text is one in xgrammar's JSON.
        disable_any_whitespace: write JSON without any space between its parts.
        calls: with json or json_object, the calls of tools that the text may be instead.
        reasoning_end: the tag from which on the form holds; before it the text is free. Empty: the form holds at once.
        reasoning_start: the tag that a text with reasoning begins with; one without it has the form at once.
        channels: the text is a reply in gpt-oss' format; any other of the ways is the form of its answer.
        excluded_words: what the text must not hold; it has no other form.
    Raises:
        BadRequestError: none of the ways is given, or several are.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag | str | None = None
    disable_any_whitespace: bool = False
    calls: StructuralTag | None = None
    reasoning_end: str = ""
    reasoning_start: str = ""
    channels: Channels | None = None
    excluded_words: Sequence[str] = ()

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            given.append("json")
        if len(given) != 1 and (given or (self.channels is None and not self.excluded_words)):
            known = ", ".join(_KINDS)
            raise BadRequestError(f"structured_outputs must have exactly one of {known}.", "structured_outputs")
        if self.choice is not None and not 1 <= len(self.choice) <= MAX_CHOICES:
            raise BadRequestError(f"choice must have 1 to {MAX_CHOICES} texts.", "structured_outputs")
