# SPDX-License-Identifier: Apache-2.0
"""`blink top`: the loop that looks at a server and shows what it sees."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import orjson
from rich.console import Console
from rich.live import Live

from blink.config import key_of_environment
from blink.errors import EngineUnavailableError
from blink.region.report import only_server
from blink.view.config import TopConfig
from blink.view.figures import Figures, compare
from blink.view.samples import RegionSource, Samples, ServerSource, Source
from blink.view.screen import Screen


def run_top(config: TopConfig) -> int:
    """Show a server's figures until `q` or Ctrl-C; return the exit status.

    Raises:
        BlinkError: there is no such server at the start.
    """
    source = _source(config)
    try:
        before = source.read()
        if config.once or config.json or not sys.stdout.isatty():
            return _print(source, before, config)
        with _single_keys():
            _show(source, before, config)
    except KeyboardInterrupt:
        pass
    finally:
        source.close()
    return 0


def _source(config: TopConfig) -> Source:
    if config.url:
        return ServerSource(config.url, config.api_key or key_of_environment())
    return RegionSource(config.region or only_server(", or give --url"))


def _print(source: Source, before: Samples, config: TopConfig) -> int:
    screen, console = Screen(source.place), Console()
    while True:
        time.sleep(config.interval)
        now = source.read()
        figures, before = compare(before, now), now
        if config.json:
            print(orjson.dumps(asdict(figures)).decode(), flush=True)
        else:
            console.print(screen.draw(figures))
        if config.once:
            return 0


def _show(source: Source, before: Samples | None, config: TopConfig) -> None:
    screen = Screen(source.place)
    with Live(screen.draw_lack("looking"), screen=True, auto_refresh=False) as live:
        while not _is_key_pressed("q", config.interval):
            try:
                now = source.read()
            except EngineUnavailableError as error:
                before = None
                live.update(screen.draw_lack(error.message), refresh=True)
                continue
            figures: Figures | None = compare(before, now) if before is not None else None
            before = now
            if figures is not None:
                live.update(screen.draw(figures), refresh=True)


@contextmanager
def _single_keys() -> Iterator[None]:
    """Get keys without Enter; the terminal is as before in the end."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_key_pressed(key: str, seconds: float) -> bool:
    """Wait for a time, or until a key is pressed; say whether it was this one."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and os.read(sys.stdin.fileno(), 1).decode(errors="replace") == key
