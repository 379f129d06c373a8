# SPDX-License-Identifier: Apache-2.0
"""Bodies that ask for much work with few bytes, made from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/responses")


@dataclass(frozen=True)
class Hostile:
    """One request."""

    path: str
    body: bytes


def _fill(head: str, item: str, tail: str, num_bytes: int, separator: str = ",") -> bytes:
    count = max(1, (num_bytes - len(head) - len(tail)) // (len(item.encode()) + len(separator)))
    return (head + separator.join([item] * count) + tail).encode()


def audited_body(name: str, num_bytes: int) -> Hostile:
    """Return one of the shapes that once froze a frontend."""
    path, head, item, tail, separator = AUDITED[name]
    return Hostile(path, _fill(head, item, tail, num_bytes, separator))


_COMPLETIONS, _CHAT, _TOKENIZE, _DETOKENIZE, _RESPONSES = _PATHS
_PROMPT = '{"max_tokens":1,"prompt":'
_TOOLS = '{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"tool_choice":"required","tools":['
_TOOL = '{"type":"function","function":{"name":"f","parameters":'
_CALL = '{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"'
# Path, and how the body begins, what it repeats, how it ends, and what stands between.
AUDITED: dict[str, tuple[str, str, str, str, str]] = {
    "an error in each item": (_COMPLETIONS, _PROMPT + '["a",', "1", "]}", ","),
    "an error in each token": (_COMPLETIONS, _PROMPT + "[1,", '"a"', "]}", ","),
    "digits": (_COMPLETIONS, _PROMPT + '"', "1" * 99, '"}', "1"),
    "digits to tokenize": (_TOKENIZE, '{"prompt":"', "1" * 99, '"}', "1"),
    "many prompts": (_COMPLETIONS, _PROMPT + "[", '"a"', "]}", ","),
    "many token ids": (_COMPLETIONS, _PROMPT + "[", "999", "]}", ","),
    "token ids to text": (_DETOKENIZE, '{"tokens":[', "999", "]}", ","),
    "texts for token ids": (_DETOKENIZE, '{"tokens":[', '"a"', "]}", ","),
    "stops": (_COMPLETIONS, '{"prompt":"a","stop":[', '"a"', "]}", ","),
    "messages": (_CHAT, '{"max_tokens":1,"messages":[', '{"role":"user","content":"a"}', "]}", ","),
    "parts": (_CHAT, '{"messages":[{"role":"user","content":[', '"a"', "]}]}", ","),
    "empty lists": (_COMPLETIONS, '{"prompt":"a","user":[', "[]", "]}", ","),
    "nested lists": (_COMPLETIONS, '{"prompt":"a","user":', "[", "", ""),
    "wide characters": (_COMPLETIONS, _PROMPT + '"\U0001f600', "a" * 99, '"}', "a"),
    "long stops": (_COMPLETIONS, '{"prompt":"a","stop":[', f'"{" " * 2999}a"', "]}", ","),
    "a prompt beyond the context": (_COMPLETIONS, _PROMPT + '"', "some words", '"}', " "),
    "long bias ids": (_COMPLETIONS, '{"prompt":"a","logit_bias":{', f'"{"1" * 5000}":1', "}}", ","),
    "tools": (_CHAT, _TOOLS, '{"type":"function","function":{"name":"f"}}', "]}", ","),
    "a tool's choices": (_CHAT, _TOOLS + _TOOL + '{"enum":[', '"a"', "]}}}]}", ","),
    "a tool's fields": (_CHAT, _TOOLS + _TOOL + '{"required":["a"],"properties":{', '"a":{}', "}}}}]}", ","),
    "a tool's description": (_CHAT, _TOOLS + '{"function":{"name":"f","description":"', "some words", '"}}]}', " "),
    "lists in an earlier call": (_CHAT, _CALL + '{\\"a\\":[', "[]", ']}"}}]}]}', ","),
    "nested lists in an earlier call": (_CHAT, _CALL, "[", '"}}]}]}', ""),
    "items": (_RESPONSES, '{"max_output_tokens":1,"input":[', '{"role":"user","content":"a"}', "]}", ","),
    "calls as items": (_RESPONSES, '{"input":[', '{"type":"function_call","name":"f","arguments":"{}"}', "]}", ","),
    "no JSON": (_COMPLETIONS, "x", "x", "x", ""),
}


def random_bodies(seed: int, max_bytes: int) -> Iterator[Hostile]:
    """Yield bodies without end."""
    rng = random.Random(seed)
    while True:
        num_bytes = int(max_bytes ** rng.uniform(0.3, 1.0))
        if rng.random() < 0.3:
            yield audited_body(rng.choice(list(AUDITED)), num_bytes)
            continue
        fields = {name: _value(rng, num_bytes // 3) for name in rng.sample(_NAMES, rng.randint(1, 4))}
        body = json.dumps(fields).encode()
        if rng.random() < 0.2:
            place = rng.randrange(len(body))
            body = body[:place] + rng.choice((b"", b'"', b"[", b"\xff", b"\\", b"NaN")) + body[place + 1 :]
        yield Hostile(rng.choice(_PATHS), body)


_NAMES = ["prompt", "messages", "tokens", "stop", "logit_bias", "user", "model", "n", "max_tokens", "seed"]
_NAMES += ["tools", "tool_choice", "input", "text"]


def _value(rng: random.Random, num_bytes: int) -> object:
    kinds: list[Callable[[], object]] = [
        lambda: "".join(rng.choices("a1 \n\U0001f600é{", k=min(num_bytes, 1000))) * max(1, num_bytes // 4000),
        lambda: [rng.choice((1, 10**30, -1, 0.5, "a", None, [], {}))] * (num_bytes // 4),
        lambda: [{"role": "user", "content": "a" * rng.randint(0, 100)}] * (num_bytes // 60),
        lambda: {str(key): rng.choice((1, 10**30, "x")) for key in range(num_bytes // 12)},
        lambda: rng.choice((0, -1, 1, 2**31, 10**40, 1e-50, True, None)),
    ]
    return rng.choice(kinds)()
