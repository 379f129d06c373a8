# SPDX-License-Identifier: Apache-2.0
"""`blink completion`: what a shell runs at its start, so that TAB completes commands and flags.

The script asks `blink` itself at each TAB, so it never grows old. argcomplete reads the parsers' declarations.
"""

from __future__ import annotations

import argparse

from blink.cli.loading import load

SHELLS = ("bash", "zsh", "fish")


def run(namespace: argparse.Namespace) -> int:
    """Print the script for a shell; return the exit status."""
    print(load("argcomplete", "blink completion").shellcode(["blink"], shell=namespace.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks what may follow, and end the process."""
    load("argcomplete").autocomplete(parser, always_complete_options=False)
