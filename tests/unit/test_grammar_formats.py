# SPDX-License-Identifier: Apache-2.0
"""Formats of strings: what each takes is valid by its RFC, by the official suite and by jsonschema's checker."""

from __future__ import annotations

import calendar
import ipaddress
import json
import random
import re
import warnings
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from blink.grammar.expression import Chars, Choice, Expression, Repeat, Series, Text
from blink.grammar.format_languages import format_language
from blink.grammar.formats import FORMATS
from blink.grammar.regex import parse_regex

SHARED = Path(__file__).parents[1] / "shared"
CASES = json.loads((SHARED / "format_cases.json").read_text())  # of the official suite
NEIGHBOURS = json.loads((SHARED / "format_neighbours.json").read_text())  # valid and, one character aside, invalid
CHECKER = Draft202012Validator.FORMAT_CHECKER
# jsonschema 4.26 forbids 100 in a relative JSON pointer, as it reads a 0 before another digit as leading.
CHECKED = sorted((FORMATS.keys() & CHECKER.checkers.keys()) - {"relative-json-pointer"})


def matches(format: str, text: str) -> bool:
    """Tell whether a format takes a text."""
    return format_language(format).matches(text)


# Beyond the official suite, which texts are what models write and which are what naive patterns let through.
VALID = {
    "date-time": ["2023-10-01T12:30:45.123456789+05:45", "9999-12-31T23:59:59.9Z"],
    "duration": ["P1Y", "P3M2DT1H", "PT1H1M1S", "P007W"],
    "email": [
        '""@example.org',
        "first.last+tag@mail.example.co.uk",
        "x@[IPv6:1::1.2.3.4]",
        "#!$%&'*+-/=?^_`{}|~@example.org",
    ],
    "uri": [
        "data:,",
        "tel:+1-201-555-0123",
        "http://a:b@c:65535",
        "ldap://h/?a?b",
        "http:",
        "https://xn--mnchen-3ya.de/",
    ],
    "ipv6": ["2001:db8::", "::255.255.255.255", "1::8", "1:2:3:4:5:6::8"],
    "regex": ["^https?://", r"^(?:(?:25[0-5]|2[0-4]\d)\.){3}x$", "[é-]", "[-+]?[0-9]*[.]?[0-9]+", "a|", "()"],
}
INVALID = {
    "date-time": ["2023-10-01T12:30:45", "2023-10-01T12:30Z", "2023-10-01T12:30:45+5:30", "2023-10-01T12:30:45.Z"],
    "duration": ["P", "PT", "P1", "P1S", "p1d", "P1Y1W", "P1H", "PT1.5S", "P-1D"],
    "email": ["a@b..c", "a@b.", "a@[1.2.3.256]", "a@[IPv6:1:2:3:4:5:6:7::]", "a@[x:y]", "é@b", "a@b" + ".c" * 126],
    "hostname": ["a..b", "a.", ".", "a" * 64, "123.45.6.7", ".".join(["a" * 63] * 3 + ["a" * 62])],
    "idn-hostname": ["ü" * 22, "字" * 15, "é.א", "א.é", "ﬀ", "e\u0301", "ดุ้"],
    "ipv6": ["1::2::3", "1:2:3:4:5:6:7:8::", "::1%eth0", "1:2:3:4:5:6:7:1.2.3.4", "00000::", ":::"],
    "uri": ["//a", "a", "http://a b", "http://[::1", "http://::1", "é:", "http://[::1%25x]/"],
    "uuid": ["{00000000-0000-0000-0000-000000000000}", "0" * 32],
    "regex": [
        "a**",
        "(a",
        "[a",
        "a{2,1}",
        r"\1",
        "(?<=a)b",
        "[z-a]",
        "a++",
        "(?i)a",
        r"\p{L}",
        "^*",
        "a{",
        "[[:alpha:]]",
        "]",
    ],
}


def draw(expression: Expression, chance: random.Random) -> str:
    """Return a text of an expression."""
    if isinstance(expression, Text):
        return expression.data.decode()
    if isinstance(expression, Chars):
        return chr(chance.randint(*chance.choice(expression.ranges)))
    if isinstance(expression, Series):
        return "".join(draw(part, chance) for part in expression.parts)
    if isinstance(expression, Choice):
        return draw(chance.choice(expression.options), chance)
    assert isinstance(expression, Repeat)
    most = expression.least + 4 if expression.most is None else expression.most
    count = chance.choice([expression.least, min(expression.least + 2, most), chance.randint(expression.least, most)])
    return "".join(draw(expression.part, chance) for _ in range(count))


def differ_by_one_character(first: str, second: str) -> bool:
    start = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    if start is None:
        return abs(len(first) - len(second)) == 1
    return any(first[start + skip :] == second[start + other :] for skip, other in ((1, 1), (1, 0), (0, 1)))


@pytest.mark.parametrize("format", FORMATS)
def test_the_official_suite_is_obeyed(format: str) -> None:
    cases = CASES[format]
    assert [text for text in cases["valid"] if not matches(format, text)] == []
    assert [text for text in cases["invalid"] if matches(format, text)] == []
    assert [text for text in cases["left_out"] if matches(format, text)] == []


@pytest.mark.parametrize("format", FORMATS)
def test_one_character_makes_a_valid_text_invalid(format: str) -> None:
    for valid, invalid in NEIGHBOURS[format]:
        assert differ_by_one_character(valid, invalid), valid
        assert matches(format, valid), valid
        assert not matches(format, invalid), invalid
        if format in CHECKED:
            assert CHECKER.conforms(valid, format), valid


@pytest.mark.parametrize("format", sorted(VALID.keys() | INVALID.keys()))
def test_usual_texts_are_judged_right(format: str) -> None:
    assert [text for text in VALID.get(format, []) if not matches(format, text)] == []
    assert [text for text in INVALID.get(format, []) if matches(format, text)] == []


@pytest.mark.parametrize("format", sorted(FORMATS.keys() - {"json-pointer", "relative-json-pointer", "regex"}))
def test_nothing_is_valid_with_a_line_break_at_its_end(format: str) -> None:
    assert [valid for valid, _ in NEIGHBOURS[format] if matches(format, valid + "\n")] == []


@pytest.mark.parametrize("format", CHECKED)
def test_jsonschema_accepts_what_is_drawn(format: str) -> None:
    expression, chance, num_drawn = parse_regex(FORMATS[format].patterns[0]), random.Random(format), 0
    for _ in range(300):
        text = draw(expression, chance)
        if matches(format, text):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # Python may read a bracket in a set otherwise one day
                assert CHECKER.conforms(text, format), text
            num_drawn += 1
    assert num_drawn >= 100


def test_the_29th_of_february_is_in_leap_years_alone() -> None:
    assert not matches("date", "0000-02-29")  # validators have no year 0
    for year in range(1, 10_000):
        assert matches("date", f"{year:04}-02-29") == calendar.isleap(year), year


def test_dates_are_those_of_the_calendar() -> None:
    for year in (1999, 2000):
        for month in range(14):
            num_days = calendar.monthrange(year, month)[1] if 1 <= month <= 12 else 0
            days = [day for day in range(34) if matches("date", f"{year}-{month:02}-{day:02}")]
            assert days == list(range(1, num_days + 1))


@pytest.mark.parametrize("sign", ["+", "-"])
def test_a_leap_second_is_one_in_utc(sign: str) -> None:
    for offset in range(0, 24 * 60, 30):
        right = (24 * 60 - 1 + int(f"{sign}{offset}")) % (24 * 60)
        for local in {right, right - 1, right + 1, right + 30, right + 60, 24 * 60 - 1, 0, 29}:
            hours, minutes = divmod(local % (24 * 60), 60)
            text = f"{hours:02}:{minutes:02}:60{sign}{offset // 60:02}:{offset % 60:02}"
            assert matches("time", text) == (local == right), text


def test_ipv6_is_what_ipaddress_reads() -> None:
    chance, num_valid = random.Random(6), 0
    for _ in range(4000):
        parts = [
            chance.choice(["0", "a1", "FFFF", "10", "1.2.3.4" if chance.random() < 0.2 else "7"]) for _ in range(8)
        ]
        text = ":".join(parts[: chance.choice([8, 8, 7, 6, 5, 3])])
        for _ in range(chance.choice([0, 1, 1, 2])):
            at = chance.choice([0, len(text), chance.choice([match.start() for match in re.finditer(":", text)])])
            text = text[:at] + chance.choice([":", "::"]) + text[at:]
        try:
            ipaddress.IPv6Address(text)
            is_valid = True
        except ValueError:
            is_valid = False
        assert matches("ipv6", text) == is_valid, text
        num_valid += is_valid
    assert num_valid > 400


@pytest.mark.parametrize("format", ["uri-reference", "iri-reference"])
def test_references_beside_a_length_may_be_relative_to_a_document(format: str) -> None:
    language = format_language(format, 120)
    for text in ("s", "img/a.png?x#y", "../up", "./this:that", "/", "/a//b", "", "?q", "#f", "@", "a:b", "%41/"):
        assert language.matches(text), text
        assert CHECKER.conforms(text, format), text
    assert [text for text in ("1:b", ":", "a b", "%4", "a[", "é:/", "\\") if language.matches(text)] == []


# What a validator takes and no small automaton can judge, and what is surely not valid.
PERHAPS = {
    "date": "0000-02-30",
    "time": "08:17:60+07:43",
    "date-time": "1998-03-05T11:59:60.5+00:30",
    "duration": "p3d",
    "email": f'"{chr(92)}q{"z" * 60}"@b.example',
    "idn-email": "ö" * 20 + "a" * 20 + "@b.example",
    "hostname": "www.xn--bcher-kva.example",
    "idn-hostname": "l·l.example",
    "uri-template": "/x{=rest}",
    "relative-json-pointer": "2+1/a",
    "regex": r"((([a]))\1)",
}
NEVER = {
    "date": "2023-2-3",
    "time": "08:17+01:00",
    "date-time": "1998-03-05",
    "duration": "3 days",
    "email": "b.example",
    "idn-email": "ö.example",
    "hostname": "10.0.0.200",
    "idn-hostname": "a b",
    "uri-template": "/x{",
    "relative-json-pointer": "/a",
}


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_left_out_of_a_format_is_not_of_its_opposite_either(format: str) -> None:
    inner, outer = format_language(format), format_language(format, is_outer=True)
    assert (inner - outer).is_empty
    assert (format in PERHAPS) == (FORMATS[format].outer is not None)
    if format in PERHAPS:
        assert not inner.matches(PERHAPS[format])
        assert outer.matches(PERHAPS[format])
    if format != "regex":
        assert not outer.matches(NEVER.get(format, "a b"))


@pytest.mark.parametrize("format", sorted(CASES))
def test_all_valid_texts_are_of_the_outer_language(format: str) -> None:
    language = format_language(format, is_outer=True)
    valid = CASES[format]["valid"] + VALID.get(format, [])
    assert [text for text in valid if not language.matches(text)] == []
