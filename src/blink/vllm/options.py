# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments of vLLM's LLM class, which are its flags: as Blink's own options."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from blink.vllm.table import Flag, load_table, spell


def to_own_options(options: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return the options that Blink has, vLLM's other names and values of them as its own.

    An option that neither knows stays, one without effect does not. None means the default, as in vLLM.

    Raises:
        ConfigError: one asks for something that Blink does not do.
    """
    found: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    for name, value in options.items():
        flag = load_table().get(f"--{name.replace('_', '-')}")
        if value is None:
            continue
        if flag is not None and flag.action == "same" and (name in own or name != _option(flag.name)):
            found[_option(flag.name)] = _to_own(flag, value)
        elif name in own or flag is None or flag.action in ("same", "config"):
            found[name] = value
        elif flag.action == "alias":
            found[_option(flag.words[0])] = _to_own(flag, value)
        elif flag.action == "override":
            overrides[flag.words[0]] = value
        else:
            flag.check(_spell(flag, value))
    if overrides:
        found["hf_overrides"] = json.dumps(json.loads(found.get("hf_overrides") or "{}") | overrides)
    return found


def _option(name: str) -> str:
    return name[2:].replace("-", "_")


def _to_own(flag: Flag, value: Any) -> Any:
    if flag.kind == "list":
        return (value,) if isinstance(value, str) else tuple(value)
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return value
    known = flag.to_own(str(value))
    if known == str(value):
        return value
    return int(known) if known.removeprefix("-").isdecimal() else known


def _spell(flag: Flag, value: Any) -> str:
    if flag.is_switch:
        return "on" if value else "off"
    return spell(value)
