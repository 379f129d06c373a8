# SPDX-License-Identifier: Apache-2.0
"""What routing by prefix rests on, without Ray: points of prompts, the table of who has them, one page of metrics."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from blink.ray.metrics import merge_metrics
from blink.ray.prefix import read_body
from blink.request.prefix_table import PrefixTable


def points(**fields: object) -> tuple[bytes, ...]:
    return read_body(json.dumps(fields).encode()).points


def shared(first: tuple[bytes, ...], second: tuple[bytes, ...]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=False))


def test_a_conversations_next_turn_begins_with_the_points_of_this_one() -> None:
    messages = [{"role": "system", "content": "x" * 1000}, {"role": "user", "content": "Hello."}]
    now = points(messages=messages, model="m", temperature=0.3)
    reordered = [{"content": message["content"], "role": message["role"]} for message in messages]
    reply = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More."}]
    then = points(messages=[*reordered, *reply])
    assert then[: len(now)] == now and len(then) == len(now) + 2
    other = points(messages=[messages[0], {"role": "user", "content": "Hullo."}])
    assert shared(now, other) == len(now) - 1
    assert shared(now, points(messages=messages, tools=[{"type": "function"}])) == 0
    assert shared(now, points(messages=messages, cache_salt="mine")) == 0


@pytest.mark.parametrize("prompt", ["word " * 400, list(range(1000, 1400)), ["a" * 2000, "b"]])
def test_a_longer_prompt_begins_with_the_points_of_a_shorter_one(prompt: str | list[int] | list[str]) -> None:
    whole = points(prompt=prompt)
    beginning = points(prompt=prompt[: len(prompt) // 2])
    assert len(whole) > 5
    assert shared(whole, beginning) >= len(beginning) - 1


def test_what_is_no_request_has_no_points() -> None:
    for body in (b"", b"{", b"[]", b'{"messages": 3}', b'{"model": 3}', b"\xff" * 9, b"[" * 100_000):
        read = read_body(body)
        assert read.model is None and len(read.points) <= 1
    assert len(points(prompt="a" * 1_000_000)) == 256


def test_the_longest_prefix_decides_among_the_replicas_that_are_there() -> None:
    table = PrefixTable[str](capacity=4)
    a, b, c, d, e = (bytes([number]) for number in range(5))
    table.add([a, b], "one")
    table.add([a], "two")
    assert table.longest((a, b, c), {"one", "two"}) == ({"one"}, 2)
    assert table.longest((a, b, c), {"two"}) == ({"two"}, 1)
    assert table.longest((a,), {"one", "two"}) == ({"one", "two"}, 1)
    assert table.longest((c,), {"one", "two"}) == (set(), 0) == table.longest((), {"one"})
    assert (table.size("one"), table.size("two")) == (2, 1)
    table.add([c, d, e], "two")  # b, the least recently used, is forgotten
    assert table.longest((b,), {"one", "two"}) == (set(), 0)
    assert (table.size("one"), table.size("two")) == (1, 4)


def test_pages_of_metrics_become_one_that_tells_replicas_apart() -> None:
    page = b'# HELP a Text: "here".\n# TYPE a gauge\na{engine="0",x="1"} 2.0\n'
    page += b'# HELP b_total B.\n# TYPE b_total counter\nb_total{engine="0"} 3.0\n'
    merged = merge_metrics({"one": page, "two": page.replace(b"2.0", b"5.0")}).decode()
    families = list(text_string_to_metric_families(merged))
    assert [family.name for family in families] == ["a", "b"]
    found = {(sample.labels["engine"], sample.value) for sample in families[0].samples}
    assert found == {("one", 2.0), ("two", 5.0)}
    assert merged.count("# TYPE a gauge") == 1
