# SPDX-License-Identifier: Apache-2.0
"""The options of the protocol: a short form by default, the whole with --full; each part can be told apart."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flat.kinds import KINDS

_SHORT: Final = {"doses": [0.0, 8.0], "rates": [8.0], "duration": 20.0, "runs": 1}
_FULL: Final = {
    "doses": [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0],
    "rates": [0.5, 8.0, 32.0],
    "duration": 120.0,
    "runs": 5,
}


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; what was not given comes from the short or the full form."""
    own = list(arguments)
    serve: list[str] = []
    if "--" in own:
        place = own.index("--")
        own, serve = own[:place], own[place + 1 :]
    parser = _make_parser()
    options = parser.parse_args(own)
    for name, value in (_FULL if options.full else _SHORT).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.request_timeout is None:
        options.request_timeout = max(20.0, options.duration)
    if unknown := sorted(set(options.kinds) - set(KINDS)):
        parser.error(f"--kinds: unknown {', '.join(unknown)}; choose of {', '.join(KINDS)}")
    if options.url and serve:
        parser.error("with --url nothing is served, so that nothing may stand after --")
    if min(options.doses) < 0 or min(options.rates) <= 0 or options.duration <= 0 or options.runs < 1:
        parser.error("--doses must not be negative; --rates, --duration and --runs must be more than 0")
    options.serve, options.arguments = serve, list(arguments)
    return options


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py", description="Everything after -- is passed to blink serve.")
    add = parser.add_argument
    add("--url", default="", help="server to measure; without it, blink serve is started")
    add("--model", default="", help="model to ask; empty: the server's first")
    add("--out", type=Path, default=Path("build/flat"), help="folder for the results (%(default)s)")
    add("--full", action="store_true", help="the whole protocol; tells first how long it takes")
    add("--kinds", type=_words, default=list(KINDS), help=f"kinds of neighbours: {','.join(KINDS)}", metavar="LIST")
    add("--doses", type=_numbers, help="busy processes per core", metavar="LIST")
    add("--rates", type=_numbers, help="requests per second", metavar="LIST")
    add("--duration", type=float, help="seconds of load in each case")
    add("--runs", type=int, help="how often; with several, each is in random order")
    add("--seed", type=int, default=0, help="seed of load and order")
    add("--mean-input-len", type=int, default=185, help="mean tokens of a prompt (%(default)s)")
    add("--mean-output-len", type=int, default=215, help="mean tokens of an answer (%(default)s)")
    add("--prompt-format", choices=("tokens", "text"), default="tokens", help="how prompts are sent")
    add("--request-timeout", type=float, help="seconds after which an answer counts as unfinished")
    add("--client-cpus", default="auto", help="cores of the client alone; empty: any", metavar="LIST")
    add("--neighbour-cpus", default="", help="cores of the neighbours; empty: all but the client's", metavar="LIST")
    add("--server-cores", default="", help="the server's cores, for a control beside them", metavar="LIST")
    add("--server-pid", type=int, default=0, help="the server's first process, whose cgroup is throttled")
    add("--stop-engine", type=int, default=0, help="process to stop for 10 s: tokens must go on", metavar="PID")
    add("--stop-frontend", type=int, default=0, help="process to stop for 2 s: tokens must stop", metavar="PID")
    add("--trace", nargs="?", const="", help="read the engine's steps too, of this region or the only one")
    return parser


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]
