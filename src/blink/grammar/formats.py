# SPDX-License-Identifier: Apache-2.0
"""The formats of JSON Schema's draft 2020-12: which texts each takes, as data of which automata are made.

All that a format takes is valid. What no small automaton can decide is left out; comments list what valid texts are.
Where something is left out, `outer` takes that too: what is not in it is surely not valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """Texts that match every pattern and none of the excluded, each as a whole.

    outer: a pattern of all texts that some validator takes, if those are more.
    plain: patterns of valid texts alone that take fewer states, for texts of at most so many characters.
    """

    patterns: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    outer: str | None = None
    plain: Callable[[int], tuple[str, ...]] | None = None


def _any(options: Iterable[str]) -> str:
    return f"(?:{'|'.join(options)})"


_ANY_CHAR = "(?:[^a]|a)"
_NOT_ASCII = "\x80-\ud7ff\ue000-\U0010ffff"

# RFC 3339, section 5.6: dates and times.
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # validators have no year 0
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR, _MINUTE, _FRACTION = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]", r"(?:\.[0-9]+)?"
_TIME = f"{_HOUR}:{_MINUTE}:{_MINUTE}{_FRACTION}(?:[Zz]|[+-]{_HOUR}:{_MINUTE})"


def _leap_seconds(sign: str, offsets: Iterable[int]) -> str:
    """Return the local times of 23:59:60 UTC at these offsets, which are in minutes."""
    options = []
    for offset in offsets:
        local = (23 * 60 + 59 + int(f"{sign}{offset}")) % (24 * 60)
        hours, minutes = divmod(local, 60)
        options.append(f"{hours:02}:{minutes:02}:60{_FRACTION}[{sign}]{offset // 60:02}:{offset % 60:02}")
    return _any(options)


_OUTER_DATE = f"(?:{_DATE}|0000-[01][0-9]-[0-3][0-9])"
_OUTER_TIME = f"{_HOUR}:{_MINUTE}:(?:{_MINUTE}|60){_FRACTION}(?:[Zz]|[+-]{_HOUR}:{_MINUTE})"
_UTC_LEAP_SECOND = rf"23:59:60{_FRACTION}(?:[Zz]|[+-]00:00)"
# Left out: leap seconds at offsets that are neither whole nor half hours, and in date-time those that no place has.
_HALF_HOURS = range(30, 24 * 60, 30)
_WEST = (*range(60, 13 * 60, 60), 150, 210, 570)
_EAST = (*range(60, 15 * 60, 60), 210, 270, 330, 390, 570, 630)
# By RFC 3339, section 5.7, leap seconds are at the ends of June and December.
_LEAP_DATE_TIME = _any(
    (
        f"{_YEAR}-(?:06-30|12-31)[Tt](?:{_UTC_LEAP_SECOND}|{_leap_seconds('-', _WEST)})",
        f"{_YEAR}-(?:07-01|01-01)[Tt]{_leap_seconds('+', _EAST)}",
    )
)

# RFC 3339, appendix A. Left out: durations in small letters, which its ABNF takes and ISO 8601 does not.
_DAYS = "[0-9]+D"
_MONTHS = f"[0-9]+M(?:{_DAYS})?"
_MINUTES = "[0-9]+M(?:[0-9]+S)?"
_CLOCK = f"T(?:[0-9]+H(?:{_MINUTES})?|{_MINUTES}|[0-9]+S)"
_DURATION = f"P(?:(?:[0-9]+Y(?:{_MONTHS})?|{_MONTHS}|{_DAYS})(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)"
_OUTER_DURATION = "[Pp][0-9YMDTHSWymdthsw]+"

# RFC 2673 and 4291: addresses, as RFC 3986 writes them.
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _ipv6(zeros: int, ipv4: str) -> str:
    """Return the addresses whose `::` stands for at least that many groups."""
    tail = _any((f"{_GROUP}:{_GROUP}", ipv4))
    options = [f"(?:{_GROUP}:){{6}}{tail}"]
    for before in range(8 - zeros + 1):
        head = f"(?:(?:{_GROUP}:){{{before - 1}}}{_GROUP})" if before else ""
        after = 8 - zeros - before
        options.append(f"{head}::(?:{_GROUP}(?::{_GROUP}){{0,{after - 1}}})?" if after else f"{head}::")
        if after >= 2:
            options.append(f"{head}::(?:{_GROUP}:){{0,{after - 2}}}{ipv4}")
    return _any(options)


_IPV6 = _ipv6(1, _IPV4)

# RFC 1123 and 5890. Left out: labels that begin with xn--, since an automaton cannot judge Punycode.
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_SHORT_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,18}[A-Za-z0-9])?"
# A name has 253 characters at most. Left out: names of more than 3 labels of which one has more than 20.
_HOST = _any((rf"{_LABEL}(?:\.{_LABEL}){{0,2}}", rf"{_SHORT_LABEL}(?:\.{_SHORT_LABEL}){{0,5}}"))
# An address has 254 characters at most.
_MAIL_HOST = _any((rf"{_LABEL}(?:\.{_LABEL})?", rf"{_SHORT_LABEL}(?:\.{_SHORT_LABEL}){{0,5}}"))
_ANY_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"


def _plain_host(most: int) -> tuple[str, ...]:
    """Return the names of at most 63 characters in all, so that no label has more."""
    return rf"{_ANY_LABEL}(?:\.{_ANY_LABEL})*", f".{{0,{min(most, 63)}}}"


_A_LABELS = r"(?:.*\.)?[xX][nN]--.*"
_DOT = "[.\u3002\uff0e\uff61]"  # as RFC 3490 knows them
_DOTTED_DECIMAL = f"[0-9]{{1,3}}(?:{_DOT}[0-9]{{1,3}}){{3}}"
_OUTER_HOST = f"(?!{_DOTTED_DECIMAL}$)[A-Za-z0-9._-]*"
_OUTER_IDN_HOST = f"(?!{_DOTTED_DECIMAL}$)[A-Za-z0-9._{_NOT_ASCII}-]*"

# RFC 5321, section 4.1.2: a local part has 64 octets at most. Left out: long quoted ones with backslashes.
_ATEXT = "-A-Za-z0-9!#$%&'*+/=?^_`{|}~"
_QUOTED_TEXT = r" !#-\[\]-~"
_SNUM = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9]?[0-9])"
_SNUMS = rf"{_SNUM}(?:\.{_SNUM}){{3}}"
_LITERAL = rf"\[(?:{_SNUMS}|[Ii][Pp][Vv]6:{_ipv6(2, _SNUMS)})\]"


def _mailbox(more: str, most: int, domain: str) -> str:
    """Return addresses; more: what their local parts have beside ASCII, most: how many of both if quoted."""
    atom = f"[{_ATEXT}{more}]+"
    quoted = rf"[{_QUOTED_TEXT}]{{0,62}}|(?:[{_QUOTED_TEXT}{more}]|\\[ -~]){{0,{most}}}"
    return rf'(?:{atom}(?:\.{atom})*|"(?:{quoted})")@(?:{domain}|{_LITERAL})'


def _plain_mailbox(most: int) -> tuple[str, ...]:
    """Return addresses of which both sides of the sign are short enough."""
    atom = f"[{_ATEXT}]+"
    host = rf"{_ANY_LABEL}(?:\.{_ANY_LABEL})*"
    if most <= 64:
        return (rf"{atom}(?:\.{atom})*@{host}",)
    local = min(64, most // 2)
    return rf"{atom}(?:\.{atom})*@{host}", f"[^@]{{0,{local}}}@[^@]{{0,{min(63, most - local - 1)}}}"


_OUTER_MAIL = f"{_ANY_CHAR}*@{_ANY_CHAR}*"


def _short_local(characters: str) -> str:
    """Return texts whose local part, if not quoted, is short enough."""
    return rf'(?:{characters}|"(?:[^"\\]|\\.)*")@.*'


# RFC 5890 to 5893. Left out, beside xn--, of internationalized names:
# - letters beyond the alphabets below, and decomposed ones, since those are normalized or not by their neighbours;
# - characters that depend on their neighbours (CONTEXTJ and CONTEXTO), as the middle dot of Catalan does;
# - labels so long that the Punycode of some such label has more than 59 characters; names of more than 3 labels;
# - names of both directions but for those that begin with Hebrew or Arabic and go on in it or in Latin letters.
_SMALL_LATIN = "ß-öø-ÿ" + "".join(
    chr(code)
    for first, last in ((0x101, 0x131), (0x135, 0x137), (0x13A, 0x13E), (0x142, 0x148), (0x14B, 0x177), (0x17A, 0x17E))
    for code in range(first, last + 1, 2)
)
_ALPHABETS = f"{_SMALL_LATIN}\u0390\u03ac-\u03ce\u0430-\u045f"  # and Greek, Cyrillic
_FURTHER = (
    "\u0491\u0561-\u0586\u0904-\u0939\u0966-\u096f\u0971-\u097f\u0e01-\u0e30\u0e32\u0e40-\u0e46\u0e50-\u0e59\u10d0-\u10fa"
    "\u3005-\u3007\u3041-\u3096\u309d\u309e\u30a1-\u30fa\u30fc-\u30fe\u4e00-\u9fff\uac00-\ud7a3"
)
_MARKS = "\u0900-\u0903\u093e-\u094f\u0e31\u0e34-\u0e39\u0e47-\u0e4e"  # of Devanagari and Thai
_RIGHT_TO_LEFT = "\u05d0-\u05ea\u0620-\u063f\u0641-\u064a\u0671-\u0674\u0679-\u06d3\u06fa-\u06ff"  # Hebrew, Arabic


def _label(start: str, inside: str, end: str, most: int) -> str:
    return f"[{start}](?:[{inside}-]{{0,{most - 2}}}[{end}])?"


def _idn_host(marks: str) -> str:
    """Return the names whose labels may have these marks beside those of _MARKS."""
    letters = f"a-z0-9{_ALPHABETS}"
    all_letters = f"{letters}{_FURTHER}"
    with_marks = f"{all_letters}{_MARKS}{marks}"
    label = _any((_label(letters, letters, letters, 21), _label(all_letters, with_marks, with_marks, 14)))
    hebrew = _label(_RIGHT_TO_LEFT, f"0-9{_RIGHT_TO_LEFT}", f"0-9{_RIGHT_TO_LEFT}", 14)
    left_to_right = f"{label}(?:{_DOT}{label}){{0,2}}"
    right_to_left = f"{hebrew}(?:{_DOT}(?:{hebrew}|[a-z]{{1,14}})){{0,2}}"
    return _any((f"{_LABEL}(?:{_DOT}{_LABEL}){{0,2}}", left_to_right, right_to_left))


_THIRD_AND_FOURTH_HYPHEN = f"(?:.*{_DOT})?..--.*"
_MARKS_OUT_OF_ORDER = ".*(?:[\u0e48-\u0e4b][\u0e38\u0e39\u094d]|[\u0e38\u0e39]\u094d).*"

# RFC 6531: a local part has 64 octets of UTF-8. Left out: some of 17 to 63 characters of several lengths.
_OCTETS = _any(("[!#-?A-~]{1,64}", "[!#-?A-~\x80-\u07ff]{1,32}", f"[!#-?A-~{_NOT_ASCII}]{{1,16}}"))

# RFC 3986 and 3987.
_UCS = "\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(plane << 16 | (0x1000 if plane == 14 else 0))}-{chr(plane << 16 | 0xFFFD)}" for plane in range(1, 15)
)
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
_PERCENT = "%[0-9A-Fa-f]{2}"
_PLAIN = "A-Za-z0-9._~!$&'()*+,;="
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*:"


def _reference(more: str, private: str, prefix: str) -> str:
    """Return URIs after a prefix; more: what they have beside ASCII, private: what their queries have besides."""

    def chars(allowed: str) -> str:
        return f"(?:[{allowed}{more}-]|{_PERCENT})"

    segment = chars(f"{_PLAIN}:@")
    path = f"(?:/{segment}*)*"
    literal = rf"\[(?:{_IPV6}|[Vv][0-9A-Fa-f]+\.[{_PLAIN}:-]+)\]"
    authority = f"(?:{chars(f'{_PLAIN}:')}*@)?(?:{literal}|{chars(_PLAIN)}*)(?::[0-9]*)?"
    first = f"{segment}+" if prefix else f"{chars(f'{_PLAIN}@')}+"
    where = _any((f"//{authority}{path}", f"/(?:{segment}+{path})?", f"{first}{path}", ""))
    query, fragment = chars(f"{_PLAIN}:@/?{private}"), chars(f"{_PLAIN}:@/?")
    return rf"{prefix}{where}(?:\?{query}*)?(?:#{fragment}*)?"


_URI, _IRI = _reference("", "", _SCHEME), _reference(_UCS, _PRIVATE, _SCHEME)

_PLAIN_CHAR = rf"(?:[{_PLAIN}:@/-]|{_PERCENT})"
_PLAIN_REST = rf"(?:\?(?:{_PLAIN_CHAR}|\?)*)?(?:#(?:{_PLAIN_CHAR}|\?)*)?"
_PLAIN_URI = (
    rf"{_SCHEME}(?://[A-Za-z0-9.-]*(?::[0-9]{{0,5}})?(?:/{_PLAIN_CHAR}*)?|(?:[{_PLAIN}:@-]|{_PERCENT}){_PLAIN_CHAR}*)"
    rf"{_PLAIN_REST}"
)
_PLAIN_PATH = _any((rf"/(?:[{_PLAIN}:@-]|{_PERCENT})", rf"(?:[{_PLAIN}@-]|{_PERCENT})+/"))
_PLAIN_REFERENCE = _any((_PLAIN_URI, rf"(?:{_PLAIN_PATH}{_PLAIN_CHAR}*|/|(?:[{_PLAIN}@-]|{_PERCENT})*){_PLAIN_REST}"))

# RFC 6570 and its erratum 6937. Left out: the operators that it reserves, since their expansion is an error.
_LITERALS = rf"(?:[!#$&'-;=?-\[\]_a-z~{_UCS}{_PRIVATE}]|{_PERCENT})"
_NAME_CHAR = f"(?:[A-Za-z0-9_]|{_PERCENT})"
_VARIABLE = rf"{_NAME_CHAR}(?:\.?{_NAME_CHAR})*(?::[1-9][0-9]{{0,3}}|\*)?"
_URI_TEMPLATE = rf"(?:{_LITERALS}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
_OUTER_URI_TEMPLATE = rf"(?:{_LITERALS}|\{{[^}}]*\}})*"

# RFC 6901. Left out of relative ones: index manipulation (0+1), which validators refuse.
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

# ECMA-262 with its flag u. Valid regular expressions are not regular. Left out:
# - groups nested deeper than 2, groups inside of look-aheads, back references;
# - what dialects read differently: names, look-behind, \p, \c, empty sets, a bracket or brace that stands for itself;
# - ranges and counts whose order a small automaton cannot judge.
_HEX = "[0-9A-Fa-f]"
_UNIT = f"\\\\u(?:[0-9A-CE-Fa-ce-f]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})"
_ESCAPE = rf"(?:\\[dDwWsStnrfv^$\\.*+?()\[\]{{}}|/]|\\x{_HEX}{{2}}|{_UNIT})"
_COUNT = _any(
    (
        "[0-9]{1,3},?",
        "[0-9],[1-9][0-9]{1,2}",
        "[1-9][0-9],[1-9][0-9]{2}",
        *(f"{least},[{least}-9]" for least in range(10)),
    )
)
_QUANTIFIER = rf"(?:[*+?]|\{{{_COUNT}\}})\??"
_RANGE = _any(
    (
        *(f"{least}-[{least}-9]" for least in range(10)),
        "[a-z]-z|a-[a-z]|[A-Z]-Z|A-[A-Z]",
        rf"\\u00{_HEX}{{2}}-\\u00[Ff]{{2}}|\\u[0-8]{_HEX}{{3}}-\\u[9A-CE-Fa-ce-f]{_HEX}{{3}}",
    )
)
_SET_ITEM = rf"(?:{_RANGE}|[^\\\]^-]|{_ESCAPE}|\\-)"
_SET = rf"\[\^?(?:-|-?(?:{_SET_ITEM}\^*)+-?)\]"
_ATOM = rf"(?:[^\\^$*+?()\[\]{{}}|]|{_ESCAPE}|{_SET})"


_PLAIN_TERMS = rf"{_ATOM}(?:{_QUANTIFIER})?|[|^$]|\\[bB]"
_GROUP_TERMS = rf"{_PLAIN_TERMS}|\((?:\?:)?(?:{_PLAIN_TERMS})*\)(?:{_QUANTIFIER})?"
_REGEX = rf"(?:{_GROUP_TERMS}|\((?:\?:)?(?:{_GROUP_TERMS})*\)(?:{_QUANTIFIER})?|\(\?[=!](?:{_PLAIN_TERMS})*\))*"


FORMATS: dict[str, Format] = {
    "date": Format((_DATE,), outer=_OUTER_DATE),
    "time": Format(
        (_any((_TIME, _UTC_LEAP_SECOND, _leap_seconds("+", _HALF_HOURS), _leap_seconds("-", _HALF_HOURS))),),
        outer=_OUTER_TIME,
    ),
    "date-time": Format((_any((f"{_DATE}[Tt]{_TIME}", _LEAP_DATE_TIME)),), outer=f"{_OUTER_DATE}[Tt]{_OUTER_TIME}"),
    "duration": Format((_DURATION,), outer=_OUTER_DURATION),
    "email": Format(
        (_mailbox("", 31, _MAIL_HOST), _short_local("[!#-?A-~]{1,64}")), outer=_OUTER_MAIL, plain=_plain_mailbox
    ),
    "idn-email": Format(
        (_mailbox(_NOT_ASCII, 15, _any((_MAIL_HOST, _idn_host("\u0300-\u033f")))), _short_local(_OCTETS)),
        outer=_OUTER_MAIL,
        plain=_plain_mailbox,
    ),
    "hostname": Format((_HOST,), (_A_LABELS, _DOTTED_DECIMAL), outer=_OUTER_HOST, plain=_plain_host),
    "idn-hostname": Format(
        (_idn_host(""),),
        (_THIRD_AND_FOURTH_HYPHEN, _DOTTED_DECIMAL, _MARKS_OUT_OF_ORDER),
        outer=_OUTER_IDN_HOST,
        plain=_plain_host,
    ),
    "ipv4": Format((_IPV4,)),
    "ipv6": Format((_IPV6,)),
    "uri": Format((_URI,), plain=lambda _: (_PLAIN_URI,)),
    "uri-reference": Format((_any((_URI, _reference("", "", ""))),), plain=lambda _: (_PLAIN_REFERENCE,)),
    "iri": Format((_IRI,), plain=lambda _: (_PLAIN_URI,)),
    "iri-reference": Format((_any((_IRI, _reference(_UCS, _PRIVATE, ""))),), plain=lambda _: (_PLAIN_REFERENCE,)),
    "uuid": Format((f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",)),
    "uri-template": Format((_URI_TEMPLATE,), outer=_OUTER_URI_TEMPLATE),
    "json-pointer": Format((_POINTER,)),
    "relative-json-pointer": Format(
        (f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",), outer=f"[0-9]+(?:[+-][0-9]+)?(?:#|{_POINTER})"
    ),
    "regex": Format((_REGEX,), outer=f"{_ANY_CHAR}*"),
}
