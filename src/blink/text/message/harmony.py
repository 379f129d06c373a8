# SPDX-License-Identifier: Apache-2.0
"""Read gpt-oss' format, "harmony": messages with headers that name their channel and recipient, between special tokens.

    <|start|>ROLE[ to=RECIPIENT]<|channel|>CHANNEL[ to=RECIPIENT][ <|constrain|>TYPE]<|message|>TEXT<|end|>

In the text that is read here each of these special tokens is a single mark, a character that no decoded text holds. So
what a model spells in ordinary tokens is always text. OpenAI's own reader, openai-harmony, fetches a vocabulary from
the network when it starts, which many servers cannot.
"""

from __future__ import annotations

import re
from collections.abc import Container

from blink.text.message.parts import CallArguments, CallOpened, Content, Part, Reading, Reasoning, merge

START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL = "\udc81\udc82\udc83\udc84\udc85\udc86\udc87"  # lone surrogates
MARKS = {
    "<|start|>": START,
    "<|channel|>": CHANNEL,
    "<|constrain|>": CONSTRAIN,
    "<|message|>": MESSAGE,
    "<|end|>": END,
    "<|return|>": RETURN,
    "<|call|>": CALL,
}
END_TOKENS = ("<|return|>", "<|call|>")  # of a turn; <|end|> is that of one of its messages
NAMESPACE = "functions."

_MARK = re.compile(f"([{START}-{CALL}])")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_MAX_HEADER = 512
_HEADER_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code")


def is_reasoning_open(prompt: str) -> bool | None:
    """Say whether a prompt leaves its reply inside of reasoning (true) or of an answer; None: before a header."""
    _, start, message = prompt.rpartition("<|start|>")
    header, opened, text = message.partition("<|message|>")
    if not start or not opened or any(end in text for end in ("<|end|>", *END_TOKENS)):
        return None
    return "<|channel|>analysis" in header


class HarmonyParser:
    """Parse the text of one reply: nothing that a model writes is an error, and no text is lost.

    Headers are structure. A header that never comes to its message is content, unless all of its words are a header's;
    so is what stands outside of messages. Texts of one kind in several messages have a line break between them.
    """

    def __init__(
        self, names: Container[str] | None, *, parallel: bool, has_reasoning: bool, is_reasoning_open: bool | None
    ) -> None:
        """Begin as the prompt leaves the reply.

        Args:
            names: the functions; None if none are offered: then calls are content.
            parallel: read more than one call; else all behind the first is dropped.
            has_reasoning: tell reasoning from content.
            is_reasoning_open: see the function of this name.
        """
        self.num_calls = 0
        self._names = names
        self._parallel = parallel
        self._reasoning = Reasoning if has_reasoning else Content
        self._header = ""
        self._has_begun = False  # the header has, by a mark
        self._kind: type[Content | Reasoning | CallArguments] | None = None  # of the open message; None: in a header
        self._is_fresh = False  # the open message has no text yet
        self._given: set[type[Part]] = set()
        self._is_over = False
        self._is_at_mark = False  # the last text was one
        if is_reasoning_open is not None:
            self._open(self._reasoning if is_reasoning_open else Content)

    @property
    def is_inside(self) -> bool:
        """Say whether the text that comes next is reasoning."""
        return self._kind is Reasoning

    @property
    def reading(self) -> Reading:
        """Return what the text that came last is; a header counts as a call once it has led to a message."""
        if self._kind is None:
            return Reading.UNSURE
        return Reading.CALL if self._kind is CallArguments or self._is_at_mark else Reading.TEXT

    def stays_with(self, text: str) -> bool:
        """Say whether a piece of text is certain to be what the text before it is."""
        return self._kind is not None and not self._is_at_mark and not _MARK.search(text)

    def push(self, text: str) -> list[Part]:
        """Return what the message has gained by a piece of text."""
        parts: list[Part] = []
        for piece in _MARK.split(text):
            if self._is_over:
                break
            if piece in _TAKERS:
                _TAKERS[piece](self, parts)
            elif piece:
                self._take_text(piece, parts)
            if piece:
                self._is_at_mark = piece in _TAKERS
        return merge(parts)

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the text."""
        parts: list[Part] = []
        self._close(parts)
        return merge(parts)

    def _take_text(self, text: str, parts: list[Part]) -> None:
        if self._kind is not None:
            self._add(text, parts)
            return
        self._header += text
        head = self._header.lstrip()
        # Without a mark before it, only a recipient begins a header.
        is_possible = self._has_begun or head.startswith("to=") or "to=".startswith(head)
        if not is_possible or len(self._header) > _MAX_HEADER:
            self._fall_back(parts)

    def _take_start(self, parts: list[Part]) -> None:
        self._close(parts)
        self._has_begun = True

    def _take_channel(self, parts: list[Part]) -> None:
        if self._kind is not None or CHANNEL in self._header:
            self._close(parts)
        self._header += CHANNEL
        self._has_begun = True

    def _take_constrain(self, parts: list[Part]) -> None:
        if self._kind is None:
            self._take_text(" ", parts)

    def _take_message(self, parts: list[Part]) -> None:
        if self._kind is not None:
            return
        head, _, behind = self._header.partition(CHANNEL)
        channel = behind.split(maxsplit=1)[0] if behind.strip() else ""
        found = _RECIPIENT.search(head) or _RECIPIENT.search(behind)
        recipient = found[1] if found else ""
        name = self._function_of(recipient)
        if name and self._names is not None:
            self._open(CallArguments)
            self.num_calls += 1
            parts.append(CallOpened(name))
        elif name:
            self._open(Content)  # a call where no tools are offered
        else:
            # What is for a tool that the model believes to have is its own business.
            self._open(self._reasoning if recipient or channel == "analysis" else Content)

    def _function_of(self, recipient: str) -> str:
        """Return the function that a message is for, empty for none."""
        if recipient.startswith(NAMESPACE):
            return recipient[len(NAMESPACE) :]
        return recipient if self._names is not None and recipient in self._names else ""

    def _close(self, parts: list[Part]) -> None:
        """End the message that is open, or give up the header."""
        if self._kind is None and not _is_header(self._header):
            self._fall_back(parts)
        self._is_over = self._is_over or (self._kind is CallArguments and not self._parallel)
        self._kind = None
        self._header = ""
        self._has_begun = False

    def _fall_back(self, parts: list[Part]) -> None:
        """Make content of what is no header, and of what follows it."""
        text = self._header.lstrip(CHANNEL).replace(CHANNEL, " ")
        self._open(Content)
        self._add(text, parts)

    def _open(self, kind: type[Content | Reasoning | CallArguments]) -> None:
        self._kind = kind
        self._header = ""
        self._is_fresh = True

    def _add(self, text: str, parts: list[Part]) -> None:
        kind = self._kind
        assert kind is not None
        if self._is_fresh and kind in self._given and kind is not CallArguments:
            parts.append(kind("\n"))
        self._is_fresh = False
        self._given.add(kind)
        parts.append(kind(text))


_TAKERS = {
    START: HarmonyParser._take_start,
    CHANNEL: HarmonyParser._take_channel,
    CONSTRAIN: HarmonyParser._take_constrain,
    MESSAGE: HarmonyParser._take_message,
    **dict.fromkeys((END, RETURN, CALL), HarmonyParser._close),
}


def _is_header(text: str) -> bool:
    """Say whether text is the beginning of a header that models write."""
    *words, last = text.replace(CHANNEL, " ").split() or [""]
    whole = all(word in _HEADER_WORDS or word.startswith("to=") for word in words)
    return whole and (last.startswith("to=") or any(word.startswith(last) for word in (*_HEADER_WORDS, "to=")))
