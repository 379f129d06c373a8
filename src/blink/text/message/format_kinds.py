# SPDX-License-Identifier: Apache-2.0
"""How models write tool calls and reasoning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from blink.structured_outputs import Parameters
from blink.text.message.element_call import Elements
from blink.text.message.literal_call import Literals
from blink.text.message.shapes import Shapes
from blink.text.message.tagged_call import Tags


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes its calls.

    A message's calls are prefix, calls with the separator between them, suffix; a call is begin(name), the JSON of its
    arguments, end. So they are forced; what a model writes of itself may deviate from it, and is read with patience.
    """

    opens: tuple[str, ...]  # before calls
    closes: tuple[str, ...] = ()
    between: tuple[str, ...] = ()  # that may stand around each of several calls
    bare_starts: str = ""  # characters with which a call without a marker may begin, as an answer's first
    unmarked: tuple[str, ...] = ()  # what a call of a known function may begin with anywhere
    heads: tuple[str, ...] = ()  # Shapes of names before the JSON of arguments
    has_named_objects: bool = False  # an object's one member is the call, by the function's name
    checks_names: bool = False  # a call behind a marker too is one only if the function is known
    keeps_space: bool = False  # at the end of content before a call
    hidden: tuple[str, ...] = ()  # marks around content, of which they are no part
    tags: Tags | None = None  # arguments stand one by one
    literals: Literals | None = None  # arguments stand in another notation than JSON's
    elements: Elements | None = None  # arguments are nested elements
    id_chars: int = 0  # of a call's id, where the template insists; 0: any
    id_form: str = ""  # of a call's id with its function's name and its number, where the template shows no other name
    trigger: str  # what nothing but a call begins with
    prefix: str = ""
    begin: str = '{"name": "%s", "arguments": '
    end: str = "}"
    separator: str = ", "
    suffix: str = ""
    uses_harmony: bool = False  # in messages of their own, between special tokens (blink.text.message.harmony)
    head_shapes: Shapes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_shapes", Shapes(self.heads))

    @property
    def is_bare(self) -> bool:
        """Say whether an answer may begin with a call, without a marker."""
        return bool(self.bare_starts)

    @property
    def parameters(self) -> Parameters | None:
        """Return how arguments are written, None for as the JSON of an object."""
        form = self.tags or self.literals or self.elements
        return form.written if form is not None else None

    @property
    def is_list(self) -> bool:
        """Say whether several calls share one marker."""
        return bool(self.prefix) or self.is_bare


class Space(Enum):
    """What becomes of the white space that models write around their reasoning."""

    KEPT = 0
    END_DROPPED = 1  # that at the reasoning's end is dropped
    DROPPED = 2  # that before the answer and at the reasoning's beginning too


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around reasoning."""

    open: str
    close: str
    begins_inside: bool = False  # the model reasons without writing the opening tag
    uses_harmony: bool = False  # in messages of its own, as calls are
    other_opens: tuple[str, ...] = ()
    other_closes: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()  # what ends reasoning too, and is no part of it
    answer_tags: tuple[str, ...] = ()  # around the answer, of which they are no part
    is_content: bool = False  # all of it stays in the content, behind the opening tag
    reopens: bool = False  # the answer may be interrupted by more of it
    space: Space = Space.KEPT

    @property
    def opens(self) -> tuple[str, ...]:
        """Return all opening tags."""
        return self.open, *self.other_opens

    @property
    def closes(self) -> tuple[str, ...]:
        """Return all closing tags."""
        return self.close, *self.other_closes


# Tags of Hunyuan 4: each checkpoint has an end of its own behind their names, or none.
_TAG_END = re.compile(r"<(?:think|tool_calls?|arg_key|arg_value)(:[^\s<>'\"]{1,64})>")


def find_tag_end(template: str) -> str:
    """Return what stands behind the names of a chat template's tags, empty for nothing."""
    found = _TAG_END.search(template)
    return found[1] if found else ""


Signs = Sequence[tuple[str, tuple[str, ...]]]  # of a format's name, and what a template that speaks it has


def find_format(template: str, known: Signs) -> str:
    """Return the name of the first format of which a chat template has all signs, empty for none."""
    return next((name for name, signs in known if all(sign in template for sign in signs)), "")
