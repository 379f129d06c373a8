# SPDX-License-Identifier: Apache-2.0
"""The formats of JSON Schema's strings that are constrained; all others are annotations, as the specification says."""

from __future__ import annotations

_DAY = r"-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,20}[a-zA-Z0-9])?"
_DATE = r"[1-9][0-9]{3}" + _DAY

PATTERNS = {
    "date": _DATE,
    "date-time": _DATE + "T" + _CLOCK,
    "time": _CLOCK,
    "duration": r"P([0-9]{1,4}D(T[0-9]{1,4}H)?|T([0-9]{1,4}H)?[0-9]{1,4}M|T[0-9]{1,6}S|[0-9]{1,4}W)",
    "email": rf"[a-zA-Z0-9_%+-]+(\.[a-zA-Z0-9_%+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){7}",
    "uri": r"https?://[a-zA-Z0-9.-]{1,60}(:[1-9][0-9]{0,3})?(/[a-zA-Z0-9._~!$&'()*+,;=:@-]*)*"
    r"(\?[a-zA-Z0-9._~=&+-]*)?(#[a-zA-Z0-9._~-]*)?",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}
