# SPDX-License-Identifier: Apache-2.0
"""The page of all flags, made of their declarations: python tests/shared/flag_tables.py > docs/flags.md."""

from __future__ import annotations

import argparse

from blink.bench.config import BenchConfig
from blink.cli.flags import add_flags
from blink.config import EngineConfig, FrontendConfig, ServeConfig
from blink.quantize.config import QuantizeConfig
from blink.view.config import TopConfig, TraceConfig

_COMMANDS = {"serve": ServeConfig, "engine": EngineConfig, "frontend": FrontendConfig}
_TOOLS = {"bench": BenchConfig, "top": TopConfig, "trace": TraceConfig, "quantize": QuantizeConfig}
_HEAD = """# All flags

This page is made of the flags' declarations (`python tests/shared/flag_tables.py > docs/flags.md`); a test compares.
`blink COMMAND --help` prints the same. Numbers take suffixes as in vLLM: `4k` is 4000, `4K` is 4096. The other commands
have few flags: see `blink chat --help` and `blink doctor --help`.
"""


def flags_of(config_class: type) -> dict[str, argparse.Action]:
    """Return the flags of a configuration by name, in their order."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, config_class)
    return {action.option_strings[0]: action for action in parser._actions if action.option_strings}


def render_page() -> str:
    """Return the page."""
    serve = {name: {*flags_of(kind)} for name, kind in _COMMANDS.items()}
    lines = [_HEAD, "## `blink serve`, `blink engine`, `blink frontend`\n", "| flag | of | meaning |", "|---|---|---|"]
    for flag, action in flags_of(ServeConfig).items():
        owners = [name for name in ("engine", "frontend") if flag in serve[name]]
        lines.append(_row(flag, action, ", ".join(owners) or "serve"))
    for name, kind in _TOOLS.items():
        lines += [f"\n## `blink {name}`\n", "| flag | meaning |", "|---|---|"]
        lines += [_row(flag, action) for flag, action in flags_of(kind).items()]
    return "\n".join(lines) + "\n"


def _row(flag: str, action: argparse.Action, *more: str) -> str:
    shown = flag.replace("--", "--[no-]", 1) if isinstance(action, argparse.BooleanOptionalAction) else flag
    if action.choices:
        shown += " " + "\\|".join(map(str, action.choices))
    text = str(action.help).replace("%%", "%").replace("|", "\\|")
    return " | ".join(["| `" + shown + "`", *more, text]) + " |"


if __name__ == "__main__":
    print(render_page(), end="")
