# SPDX-License-Identifier: Apache-2.0
"""`blink serve` as a replica's child: when the replica ends, however it does, it stops in order and tidies up."""

from __future__ import annotations

import shutil
import signal
import sys

from blink.cli.main import main
from blink.host.process import die_with_parent

if __name__ == "__main__":
    parent, folder, *arguments = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGTERM)
    try:
        sys.exit(main(arguments))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
